//! Who sits on the links: he reads everything, and delays, drops, spoils, repeats and makes up what he
//! likes. He has no keys.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_netem::rng::Rng;

use crate::coverage::Seen;

/// Datagrams that he remembers, of any age.
const ARCHIVE: usize = 512;

/// Acts that he may do to a datagram.
pub const ACTS: [Seen; 9] = [
    Seen::AdversaryDrop,
    Seen::AdversaryDelay,
    Seen::AdversaryDouble,
    Seen::AdversarySpoil,
    Seen::AdversarySource,
    Seen::AdversaryCross,
    Seen::AdversaryReflect,
    Seen::AdversaryReplay,
    Seen::AdversaryForge,
];

/// How he treats one direction of a path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tamper {
    /// How likely each of [`ACTS`] is, for each datagram.
    pub chances: [f64; ACTS.len()],
    /// How long he holds back, at most.
    pub hold: Duration,
}

impl Tamper {
    /// These acts, each with its probability.
    ///
    /// # Panics
    /// If one is none of [`ACTS`].
    pub fn new(acts: &[(Seen, f64)], hold: Duration) -> Self {
        let mut tamper = Self {
            hold,
            ..Self::default()
        };
        for (act, chance) in acts {
            let at = ACTS.iter().position(|a| a == act).expect("one of his acts");
            tamper.chances[at] = *chance;
        }
        tamper
    }

    /// A few acts, as the dice say.
    pub fn random(rng: &mut Rng) -> Self {
        let busy = rng.pick(&[0.2, 0.5, 1.0]);
        let chances = [(); ACTS.len()].map(|()| match rng.chance(busy) {
            true => rng.pick(&[0.002, 0.02, 0.1, 0.3]),
            false => 0.0,
        });
        Self {
            chances,
            hold: Duration::from_micros(rng.magnitude(100, 20_000_000)),
        }
    }
}

/// A datagram that he puts on a wire.
#[derive(Clone, Debug)]
pub struct Put {
    /// The host that it goes to.
    pub host: usize,
    /// The path whose socket it goes to.
    pub path: usize,
    /// Address that it claims to come from, if not from the other end.
    pub from: Option<SocketAddr>,
    /// How long he waits.
    pub after: Duration,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// No host ever sent these bytes.
    pub forged: bool,
}

/// Adversary on the way, and all that he knows.
#[derive(Debug)]
pub struct Adversary {
    rng: Rng,
    archive: Vec<(usize, Vec<u8>)>,
    seen: u64,
}

impl Adversary {
    /// Adversary who has seen nothing yet.
    pub const fn new(rng: Rng) -> Self {
        Self {
            rng,
            archive: Vec::new(),
            seen: 0,
        }
    }

    /// Reads a datagram from host `from`; of all that he read he keeps some, equally likely.
    pub fn read(&mut self, from: usize, datagram: &[u8]) {
        self.seen += 1;
        if self.archive.len() < ARCHIVE {
            self.archive.push((from, datagram.to_vec()));
        } else if self.rng.below(self.seen / 4 + 1) < ARCHIVE as u64 {
            // The later ones a little rather than the first.
            let at = self.rng.below(ARCHIVE as u64) as usize;
            self.archive[at] = (from, datagram.to_vec());
        }
    }

    /// Datagrams that become of one from host `from` on `path`, one of `paths`, that the link would
    /// deliver, and what he did. Without `forging` he makes nothing up.
    pub fn meddle(
        &mut self,
        tamper: &Tamper,
        (from, path, paths): (usize, usize, usize),
        forging: bool,
        datagram: Vec<u8>,
    ) -> (Vec<Put>, Vec<Seen>) {
        let to = 1 - from;
        let put = |bytes| Put {
            host: to,
            path,
            from: None,
            after: Duration::ZERO,
            bytes,
            forged: false,
        };
        let mut puts = Vec::new();
        let mut did = Vec::new();
        let mut original = Some(put(datagram.clone()));
        for (at, act) in ACTS.into_iter().enumerate() {
            if tamper.chances[at] == 0.0 || !self.rng.chance(tamper.chances[at]) {
                continue;
            }
            let later = self.later(tamper);
            match act {
                Seen::AdversaryDrop => original = None,
                Seen::AdversaryDelay => {
                    if let Some(original) = &mut original {
                        original.after = later;
                    }
                }
                Seen::AdversaryDouble => puts.push(Put {
                    after: later,
                    ..put(datagram.clone())
                }),
                Seen::AdversarySpoil if forging => puts.push(Put {
                    forged: true,
                    ..put(self.spoil(&datagram))
                }),
                Seen::AdversarySource => {
                    let source = Some(self.source(path));
                    let copy = put(datagram.clone());
                    match &mut original {
                        Some(original) if self.rng.chance(0.5) => original.from = source,
                        _ => puts.push(Put {
                            from: source,
                            after: later,
                            ..copy
                        }),
                    }
                }
                Seen::AdversaryCross => puts.push(Put {
                    path: self.rng.below(paths as u64) as usize,
                    after: later,
                    ..put(datagram.clone())
                }),
                Seen::AdversaryReflect => puts.push(Put {
                    host: from,
                    after: later,
                    ..put(datagram.clone())
                }),
                Seen::AdversaryReplay => puts.push(self.replay(path)),
                Seen::AdversaryForge if forging => puts.push(Put {
                    forged: true,
                    ..put(self.forge(&datagram))
                }),
                _ => continue,
            }
            did.push(act);
        }
        puts.extend(original);
        (puts, did)
    }

    /// A datagram out of nothing for a host: an old one, a spoilt one, noise.
    pub fn strike(&mut self, host: usize, paths: usize, forging: bool) -> (Put, Seen) {
        let path = self.rng.below(paths as u64) as usize;
        let mut put = Put {
            host,
            ..self.replay(path)
        };
        if self.rng.chance(0.3) {
            put.from = Some(self.source(path));
        }
        match self.rng.below(4) {
            0 if forging => {
                put.bytes = self.spoil(&put.bytes);
                put.forged = true;
                (put, Seen::AdversarySpoil)
            }
            1 if forging => {
                put.bytes = self.forge(&put.bytes);
                put.forged = true;
                (put, Seen::AdversaryForge)
            }
            _ => (put, Seen::AdversaryReplay),
        }
    }

    fn replay(&mut self, path: usize) -> Put {
        let (from, bytes) = match self.archive.len() as u64 {
            0 => (0, vec![0; 64]),
            n => self.archive[self.rng.below(n) as usize].clone(),
        };
        Put {
            host: 1 - from,
            path,
            from: None,
            after: Duration::ZERO,
            bytes,
            forged: false,
        }
    }

    fn later(&mut self, tamper: &Tamper) -> Duration {
        tamper.hold.mul_f64(self.rng.unit())
    }

    /// Another address that is his, or another port of the other end's.
    fn source(&mut self, path: usize) -> SocketAddr {
        let last = self.rng.range(3, 6) as u8;
        let ip = IpAddr::from([10, 66, path as u8, last]);
        SocketAddr::new(ip, self.rng.range(1024, 1030) as u16)
    }

    fn spoil(&mut self, datagram: &[u8]) -> Vec<u8> {
        let mut bytes = datagram.to_vec();
        match self.rng.below(4) {
            0 => bytes.truncate(self.rng.below(bytes.len() as u64) as usize),
            1 => bytes.push(self.rng.word() as u8),
            _ => {
                let bit = self.rng.below(bytes.len() as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        bytes
    }

    /// The clear header of a datagram with a number that may come next, and any content.
    fn forge(&mut self, datagram: &[u8]) -> Vec<u8> {
        let mut bytes = datagram.to_vec();
        let head = 16.min(bytes.len());
        for byte in &mut bytes[head..] {
            *byte = self.rng.word() as u8;
        }
        if let Some(seq) = bytes.get_mut(8..16) {
            let old = u64::from_be_bytes(seq.try_into().expect("eight bytes"));
            let ahead = self.rng.pick(&[0, 1, 2, 1000, 1 << 20, 1 << 40, u64::MAX]);
            seq.copy_from_slice(&old.wrapping_add(ahead).to_be_bytes());
        }
        if bytes == datagram
            && let Some(last) = bytes.last_mut()
        {
            *last ^= 1;
        }
        bytes
    }
}
