//! How much Diffie-Hellman strangers may make us do. A first message with a valid mac1 costs its
//! forger next to nothing; so beyond a rate that peers never reach only proved addresses are
//! heard, each with a rate of its own (WireGuard, 5.3). Each local path has a budget of its own, so that a flood by one
//! leaves the others theirs. The state is as large as the number of local paths says.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use siphasher::sip::SipHasher24;

use super::random::{self, Random};
use crate::time::Time;

/// First messages that are read whoever sent them: this many at once, and one each so often.
const ANYONE: Rate = Rate {
    burst: 32,
    each: Duration::from_millis(20),
};
/// The same for a proved address and port.
const PROVED: Rate = Rate {
    burst: 4,
    each: Duration::from_secs(1),
};
/// Answers that fail authentication, whoever they are from.
const FORGERIES: Rate = Rate {
    burst: 64,
    each: Duration::from_millis(5),
};
/// Proved addresses fall into so many classes, by a keyed hash: who owns few addresses cannot use up the rate
/// of others.
const ADDRESSES: usize = 128;
/// The ports of each of them fall into so many, each with a bucket: one of the hosts behind an address
/// (NAT) that calls without end leaves the others theirs.
const PORTS: usize = 16;

/// So many at once, and one each so often.
#[derive(Clone, Copy)]
pub(crate) struct Rate {
    pub(crate) burst: u32,
    pub(crate) each: Duration,
}

/// A token bucket, as the time at which it is full again (GCRA).
#[derive(Clone, Copy, Default)]
pub(crate) struct Bucket(Time);

impl Bucket {
    fn has(self, now: Time, rate: Rate) -> bool {
        self.0.since(now) <= rate.each * (rate.burst - 1)
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self, now: Time, rate: Rate) -> bool {
        let has = self.has(now, rate);
        if has {
            self.0 = self.0.max(now) + rate.each;
        }
        has
    }
}

/// Budgets of one local path.
struct Budget {
    anyone: Bucket,
    proved: Box<[[Bucket; PORTS]; ADDRESSES]>,
    forgeries: Bucket,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            anyone: Bucket::default(),
            proved: Box::new([[Bucket::default(); PORTS]; ADDRESSES]),
            forgeries: Bucket::default(),
        }
    }
}

/// Says which handshake messages are worth their cost.
pub(super) struct HandshakeLimiter {
    /// By local path, as far as any has been heard of.
    budgets: Vec<Budget>,
    class_key: [u8; 16],
}

impl HandshakeLimiter {
    pub(super) fn new(rng: &mut dyn Random) -> Self {
        let drawn = random::secret(rng);
        let (class_key, _) = drawn
            .as_bytes()
            .split_first_chunk()
            .expect("16 of 32 bytes");
        Self {
            budgets: Vec::new(),
            class_key: *class_key,
        }
    }

    fn of(&mut self, path: usize) -> &mut Budget {
        if self.budgets.len() <= path {
            self.budgets.resize_with(path + 1, Budget::default);
        }
        &mut self.budgets[path]
    }

    /// Whether a first message may be read without proof of its address.
    pub(super) fn admit_anyone(&mut self, now: Time, path: usize) -> bool {
        self.of(path).anyone.take(now, ANYONE)
    }

    /// Whether one more first message of an address and port may be read that were proved.
    pub(super) fn admit_proved(&mut self, now: Time, path: usize, source: SocketAddr) -> bool {
        // Who has an IPv6 address has 2^64 of them.
        let network = match source.ip().to_canonical() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            IpAddr::V6(ip) => (ip.to_bits() >> 64) as u64,
        };
        let hash = |end: &[u8]| SipHasher24::new_with_key(&self.class_key).hash(end) as usize;
        let mut end = [0; 10];
        end[..8].copy_from_slice(&network.to_be_bytes());
        end[8..].copy_from_slice(&source.port().to_be_bytes());
        let (address, port) = (hash(&end[..8]) % ADDRESSES, hash(&end) % PORTS);
        self.of(path).proved[address][port].take(now, PROVED)
    }

    /// Whether an answer may be read, which may turn out forged.
    pub(super) fn admit_answer(&mut self, now: Time, path: usize) -> bool {
        self.of(path).forgeries.has(now, FORGERIES)
    }

    /// An answer was forged.
    pub(super) fn note_forgery(&mut self, now: Time, path: usize) {
        self.of(path).forgeries.take(now, FORGERIES);
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::SeededRandom;
    use super::*;

    fn limiter() -> HandshakeLimiter {
        HandshakeLimiter::new(&mut SeededRandom::new([1; 32]))
    }

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn strangers_have_a_burst_and_then_a_rate() {
        let mut limiter = limiter();
        let admitted = |limiter: &mut HandshakeLimiter, now| {
            (0..1000).filter(|_| limiter.admit_anyone(now, 0)).count()
        };
        assert_eq!(admitted(&mut limiter, at(0)), 32);
        assert_eq!(admitted(&mut limiter, at(19)), 0);
        assert_eq!(
            admitted(&mut limiter, at(1000)),
            32,
            "not 50: the bucket is full"
        );
        assert_eq!(admitted(&mut limiter, at(1200)), 10);
    }

    #[test]
    fn a_proved_address_cannot_use_up_the_rate_of_others() {
        let mut limiter = limiter();
        let greedy: SocketAddr = "192.0.2.1:1".parse().unwrap();
        let admitted = (0..1000)
            .filter(|_| limiter.admit_proved(at(0), 0, greedy))
            .count();
        assert_eq!(admitted, 4);
        // Nor can all its ports.
        let from = |port| SocketAddr::from((greedy.ip(), port));
        let all = (1..=u16::MAX).filter(|port| limiter.admit_proved(at(0), 0, from(*port)));
        assert_eq!(all.count(), 15 * 4);
        let others = (2..=255u8).filter(|host| {
            let from = SocketAddr::from(([192, 0, 2, *host], 1));
            limiter.admit_proved(at(0), 0, from)
        });
        assert!(others.count() > 240);
        assert!(!limiter.admit_proved(at(999), 0, greedy));
        assert!(limiter.admit_proved(at(1000), 0, greedy));
    }

    /// Several hosts have one address, behind a NAT, and one of them calls without end.
    #[test]
    fn a_host_leaves_others_behind_its_address_their_rate() {
        for v6 in [false, true] {
            let address = match v6 {
                false => IpAddr::from([192, 0, 2, 1]),
                true => "2001:db8::1".parse().unwrap(),
            };
            let mut limiter = limiter();
            while limiter.admit_proved(at(0), 0, (address, 5300).into()) {}
            let others = 20_000..20_100;
            let heard =
                others.filter(|port| limiter.admit_proved(at(0), 0, (address, *port).into()));
            let heard = heard.count();
            assert!(heard > 40, "{heard} of 100 others");
        }
    }

    #[test]
    fn a_network_of_2_to_the_64_is_one_address() {
        let mut limiter = limiter();
        let net: SocketAddr = "[2001:db8::1]:1".parse().unwrap();
        let same: SocketAddr = "[2001:db8::ffff:2]:1".parse().unwrap();
        assert!((0..4).all(|_| limiter.admit_proved(at(0), 0, net)));
        assert!(!limiter.admit_proved(at(0), 0, same));
    }

    #[test]
    fn each_path_has_a_budget_of_its_own() {
        let mut limiter = limiter();
        let source: SocketAddr = "192.0.2.1:1".parse().unwrap();
        while limiter.admit_anyone(at(0), 3) {}
        while limiter.admit_proved(at(0), 3, source) {}
        while limiter.admit_answer(at(0), 3) {
            limiter.note_forgery(at(0), 3);
        }
        for other in [0, 7] {
            assert!(limiter.admit_anyone(at(0), other));
            assert!(limiter.admit_proved(at(0), other, source));
            assert!(limiter.admit_answer(at(0), other));
        }
    }
}
