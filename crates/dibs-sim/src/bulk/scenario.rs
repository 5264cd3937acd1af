//! What a bulk run is about: links, a sender, and what changes under way.

use std::time::Duration;

use dibs_core::bump::SEAL;
use dibs_netem::Conditions;
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

/// A transfer over links that a test has chosen.
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

    /// One of the links alone.
    pub fn alone(&self, link: usize) -> (Link, Vec<Change>) {
        let changes = self.changes.iter().filter(|c| c.link == link);
        (self.links[link].clone(), changes.cloned().collect())
    }

    /// True if trust lets one of the links alone carry all: what is scrambled leans on a trusted one.
    pub fn allows(&self, link: usize) -> bool {
        self.bump == SEAL || self.links[link].trusted
    }
}
