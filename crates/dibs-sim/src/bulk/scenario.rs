//! What a bulk run is about: links, a sender, and what changes under way.

use std::time::Duration;

use dibs_core::bump::{SCRAMBLE, SEAL};
use dibs_netem::{Conditions, rng::Rng};
use dibs_settings::BumpId;

/// A run takes so much virtual time at most; what is under way then still has to arrive.
pub const SPAN: Duration = Duration::from_secs(10);

/// A link, the same in both directions.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Bits a second.
    pub rate: u64,
    /// Without a queue.
    pub round_trip: Duration,
    /// Each direction's delay varies by up to this, either way.
    pub jitter: Duration,
    /// For each packet.
    pub loss: f64,
    /// Bytes of the buffer before the rate.
    pub buffer: usize,
    /// True if nobody reads there who is not to.
    pub trusted: bool,
    /// Nothing passes.
    pub dead: bool,
}

impl Link {
    /// A link without loss and jitter, and a buffer of 50 ms or a round trip, whichever is more, of 64 KiB at least.
    pub fn clean(megabits: u64, millis: u64, trusted: bool) -> Self {
        let (rate, round_trip) = (megabits * 1_000_000, Duration::from_millis(millis));
        Self {
            rate,
            round_trip,
            jitter: Duration::ZERO,
            loss: 0.0,
            buffer: buffer(rate, round_trip.max(Duration::from_millis(50))),
            trusted,
            dead: false,
        }
    }

    /// Conditions that the emulator makes of it.
    pub fn conditions(&self) -> Conditions {
        let conditions = Conditions::new()
            .rate(self.rate)
            .queue(self.buffer)
            .delay(self.round_trip / 2)
            .jitter(self.jitter)
            .loss(self.loss);
        Conditions {
            outage: self.dead,
            ..conditions
        }
    }
}

/// What `time` of `rate` comes to in bytes.
fn buffer(rate: u64, time: Duration) -> usize {
    ((rate as f64 / 8.0 * time.as_secs_f64()) as usize).max(64 << 10)
}

/// A link becomes another one.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Time since the transfer's start.
    pub at: Duration,
    /// Index of the link.
    pub link: usize,
    /// Link that it is from then on.
    pub becomes: Link,
}

/// A transfer over links that a seed has drawn, or a test has chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The dice of the links.
    pub seed: u64,
    /// The links.
    pub links: Vec<Link>,
    /// The bump: seal or scramble.
    pub bump: BumpId,
    /// Bytes to send.
    pub bytes: u64,
    /// Changes, in order.
    pub changes: Vec<Change>,
}

impl Scenario {
    /// A transfer over links that stay as they are.
    pub fn steady(links: Vec<Link>, bytes: u64) -> Self {
        Self {
            seed: 1,
            links,
            bump: SEAL,
            bytes,
            changes: Vec::new(),
        }
    }

    /// The scenario of a seed.
    pub fn random(seed: u64) -> Self {
        let rng = &mut Rng::new(seed);
        let links = vec![link(rng, true), link(rng, false)];
        let bump = rng.pick(&[SEAL, SCRAMBLE]);
        let bytes = rng.magnitude(10_000_000, 60_000_000);
        let changes = match rng.below(5) {
            0 | 1 => Vec::new(),
            2 => vec![changed(rng, &links, true)],
            3 => vec![changed(rng, &links, false)],
            _ => outage(rng, &links),
        };
        Self {
            seed,
            links,
            bump,
            bytes,
            changes,
        }
    }

    /// One of the links alone.
    pub fn alone(&self, link: usize) -> (Link, Vec<Change>) {
        let changes = self.changes.iter().filter(|c| c.link == link);
        (self.links[link].clone(), changes.cloned().collect())
    }

    /// True if trust lets one of the links alone carry all: what is scrambled leans on a trusted one.
    pub fn allows(&self, link: usize) -> bool {
        self.bump == SEAL || self.links[link].trusted
    }

    /// Time during which a link is dead that the bump cannot do without.
    pub fn outage(&self) -> Duration {
        let needed = |link: usize| self.bump == SCRAMBLE && self.links[link].trusted;
        let mut died = None;
        let mut longest = Duration::ZERO;
        for change in self.changes.iter().filter(|c| needed(c.link)) {
            match change.becomes.dead {
                true => died = Some(change.at),
                false => longest = longest.max(died.map_or(Duration::ZERO, |at| change.at - at)),
            }
        }
        longest
    }
}

fn link(rng: &mut Rng, trusted: bool) -> Link {
    let rate = rng.magnitude(5_000_000, 300_000_000);
    let round_trip = Duration::from_micros(rng.magnitude(4_000, 320_000));
    let jitter = match rng.chance(0.4) {
        true => round_trip.mul_f64(0.15 * rng.unit()),
        false => Duration::ZERO,
    };
    let loss = match rng.below(4) {
        0 => rng.magnitude(10, 5_000) as f64 * 1e-5,
        _ => 0.0,
    };
    // From a switch with little to a modem with much.
    let time = rng
        .magnitude(20_000, 250_000)
        .max(round_trip.as_micros() as u64 / 2);
    Link {
        rate,
        round_trip,
        jitter,
        loss,
        buffer: buffer(rate, Duration::from_micros(time)),
        trusted,
        dead: false,
    }
}

/// A link of another rate, or another delay, some time into the transfer.
fn changed(rng: &mut Rng, links: &[Link], rate: bool) -> Change {
    let link = rng.below(links.len() as u64) as usize;
    let mut becomes = links[link].clone();
    let factor = rng.magnitude(250, 4_000) as f64 / 1000.0;
    match rate {
        true => {
            becomes.rate = ((becomes.rate as f64 * factor) as u64).clamp(5_000_000, 300_000_000);
        }
        false => {
            let trip = becomes.round_trip.mul_f64(factor);
            let (least, most) = (Duration::from_millis(4), Duration::from_millis(320));
            becomes.round_trip = trip.clamp(least, most);
            becomes.jitter = becomes.jitter.min(becomes.round_trip / 4);
        }
    }
    Change {
        at: Duration::from_millis(rng.range(500, 4_000)),
        link,
        becomes,
    }
}

/// A link dies without a word, and comes back.
fn outage(rng: &mut Rng, links: &[Link]) -> Vec<Change> {
    let link = rng.below(links.len() as u64) as usize;
    let at = Duration::from_millis(rng.range(500, 4_000));
    let back = at + Duration::from_millis(rng.range(300, 4_000));
    [(at, true), (back, false)]
        .map(|(at, dead)| Change {
            at,
            link,
            becomes: Link {
                dead,
                ..links[link].clone()
            },
        })
        .into()
}
