//! Who listens on a path.

mod inside;

use std::collections::HashMap;
use std::net::IpAddr;

use dibs_core::session::{Tap, is_handshake};
use dibs_netem::rng::mix;
use dibs_settings::Handshake;

use crate::coverage::Coverage;
use crate::history::Setup;
use crate::payload;
pub(crate) use inside::Held;
use inside::{Inside, Passing};

/// Sees every datagram on every path, and looks for what must not be there.
#[derive(Default)]
pub struct Observer {
    /// Content by what the nonce is made of.
    nonces: HashMap<Nonce, u64>,
    /// Parts of keys and inner addresses that must never show.
    secrets: Secrets,
    /// The user lets untrusted paths carry everything while no trusted one is there.
    lax: bool,
    inside: Inside,
    /// Digest of what was seen, as one number.
    pub digest: u64,
    /// Datagrams seen.
    pub datagrams: u64,
    /// The user lets keys be agreed by untrusted paths, too.
    handshake_anywhere: bool,
    /// Bytes seen on trusted and untrusted paths.
    pub bytes: [u64; 2],
}

/// Direction, type (with the key phase), path id, receiver index, sequence number.
type Nonce = (usize, u8, u8, u32, u64);

impl Observer {
    /// Observer who has seen nothing yet.
    pub fn new(setup: &Setup) -> Self {
        Self {
            lax: !setup.hold_without_trusted,
            handshake_anywhere: setup.handshake != Handshake::Trusted,
            inside: Inside::new(setup),
            ..Self::default()
        }
    }

    /// A host has sent all that it can.
    ///
    /// # Errors
    /// What is missing.
    pub fn settle(&mut self) -> Result<(), String> {
        self.inside.settle()
    }

    /// Learns the keys of what a host's daemon sends by a session.
    pub fn tap(&mut self, host: usize, instance: u64, tap: Tap) {
        self.inside.tap(host, instance, tap);
    }

    /// Coverage of what happened.
    pub fn coverage(&self) -> &Coverage {
        &self.inside.seen
    }

    /// Looks for these keys, too.
    pub fn guard(&mut self, key: &[u8; 32]) {
        let halves = key.chunks(8);
        halves.for_each(|h| {
            self.secrets.add(h.try_into().expect("eight bytes"));
        });
    }

    /// Looks for these inner addresses, too: two of IPv4 side by side, the prefix of two of IPv6.
    pub fn guard_addresses(&mut self, (a, b): (IpAddr, IpAddr)) {
        match (a, b) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                for (a, b) in [(a, b), (b, a)] {
                    let pair = [a.octets(), b.octets()].concat();
                    self.secrets.add(pair.try_into().expect("eight bytes"));
                }
            }
            (a, b) => {
                for address in [a, b] {
                    if let IpAddr::V6(address) = address {
                        let prefix = address.octets()[..8].try_into().expect("eight bytes");
                        self.secrets.add(prefix);
                    }
                }
            }
        }
    }

    /// A datagram passes from host `from` by a path that is trusted by the sender's label, and by
    /// both ends'. The labels are exchanged within the session, so the handshake knows only one.
    ///
    /// # Errors
    /// What it gives away.
    pub(crate) fn see(
        &mut self,
        from: usize,
        path: usize,
        (label, trusted): (bool, bool),
        datagram: &[u8],
    ) -> Result<Held, String> {
        let content = digest(datagram);
        self.digest = mix(self.digest ^ content ^ path as u64).wrapping_add(from as u64);
        self.datagrams += 1;
        self.bytes[usize::from(!trusted)] += datagram.len() as u64;
        if is_handshake(datagram) {
            return match label || self.handshake_anywhere {
                true => Ok(Held::default()),
                false => Err(format!("a handshake message on untrusted path {path}")),
            };
        }
        if datagram.len() < 16 {
            return Err(format!("a datagram of {} bytes", datagram.len()));
        }
        let passing = Passing {
            from,
            path,
            trusted,
        };
        let held = self.inside.see(passing, datagram)?;
        self.look(passing, held, datagram, content)?;
        Ok(held)
    }

    /// What everybody on the path sees; `content` stands for the bytes.
    fn look(
        &mut self,
        passing: Passing,
        held: Held,
        datagram: &[u8],
        content: u64,
    ) -> Result<(), String> {
        let Passing {
            from,
            path,
            trusted,
        } = passing;
        let index = u32::from_be_bytes(datagram[4..8].try_into().expect("four bytes"));
        let seq = u64::from_be_bytes(datagram[8..16].try_into().expect("eight bytes"));
        let nonce = (from, datagram[0], datagram[1], index, seq);
        if self
            .nonces
            .insert(nonce, content)
            .is_some_and(|c| c != content)
        {
            return Err(format!("nonce {nonce:?} with two contents"));
        }
        if let Some(at) = self.secrets.find(datagram) {
            return Err(format!("a key or an inner address on path {path} at {at}"));
        }
        let who = crate::history::name(from);
        if payload::shows(datagram) {
            return Err(format!("plaintext on path {path} from {who}"));
        }
        let guarded = !held.chained || (!trusted && !self.lax);
        if guarded && payload::shows_unchained(datagram) {
            return Err(format!(
                "the guarded start of an epoch, or a solo chunk, on path {path} from {who}"
            ));
        }
        Ok(())
    }
}

/// Eight bytes each that must not be seen.
#[derive(Default)]
struct Secrets {
    words: Vec<u64>,
    /// A bit for each beginning that one of them has: nearly all that is looked at begins otherwise.
    begins: [u64; 32],
}

impl Secrets {
    fn place(word: u64) -> (usize, u64) {
        ((word >> 6) as usize % 32, 1 << (word % 64))
    }

    fn add(&mut self, bytes: [u8; 8]) {
        let word = u64::from_le_bytes(bytes);
        let (at, bit) = Self::place(word);
        self.begins[at] |= bit;
        self.words.push(word);
    }

    /// Where one of them stands.
    fn find(&self, bytes: &[u8]) -> Option<usize> {
        bytes.windows(8).position(|w| {
            let word = u64::from_le_bytes(w.try_into().expect("eight bytes"));
            let (at, bit) = Self::place(word);
            self.begins[at] & bit != 0 && self.words.contains(&word)
        })
    }
}

/// A number that stands for these bytes.
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(sum ^ u64::from_le_bytes(word)).wrapping_add(0x9e37_79b9_7f4a_7c15)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{Kind, Stream};

    fn datagram(seq: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![4, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, seq];
        bytes.extend_from_slice(payload);
        bytes
    }

    fn new(hold_without_trusted: bool) -> Observer {
        Observer::new(&Setup {
            hold_without_trusted,
            handshake: Handshake::Trusted,
            ..Setup::ordinary(Vec::new())
        })
    }

    fn chained() -> Held {
        Held {
            chained: true,
            ..Held::default()
        }
    }

    /// As of a chunk of a chain, if it is no handshake.
    fn see(
        observer: &mut Observer,
        from: usize,
        (label, trusted): (bool, bool),
        datagram: &[u8],
    ) -> Result<(), String> {
        if is_handshake(datagram) {
            return { observer.see(from, 0, (label, trusted), datagram) }.map(drop);
        }
        let path = 0;
        let passing = Passing {
            from,
            path,
            trusted,
        };
        observer.look(passing, chained(), datagram, digest(datagram))
    }

    fn plaintext() -> [u8; 40] {
        let mut bytes = [0; 40];
        let kind = Kind::Marked;
        Stream { key: 5, kind }.fill(3, &mut bytes);
        bytes
    }

    #[test]
    fn what_must_not_show_is_seen() {
        let trusted = (true, true);
        let untrusted = (false, false);
        let mut observer = new(true);
        let plain = datagram(0, &plaintext());
        assert!(see(&mut observer, 0, trusted, &plain).is_err());
        assert!(see(&mut observer, 0, untrusted, &plain).is_err());
        let mut chained = plaintext();
        for i in 1..chained.len() {
            chained[i] ^= chained[i - 1];
        }
        let chained = datagram(1, &chained);
        assert!(see(&mut observer, 0, trusted, &chained).is_ok());
        let alone = Passing {
            from: 1,
            path: 0,
            trusted: true,
        };
        let content = digest(&chained);
        assert!(
            observer
                .look(alone, Held::default(), &chained, content)
                .is_err()
        );
        assert!(see(&mut observer, 0, untrusted, &chained).is_err());
        assert!(see(&mut new(false), 0, untrusted, &chained).is_ok());
        let handshake = [1; 100];
        assert!(see(&mut observer, 0, trusted, &handshake).is_ok());
        assert!(see(&mut observer, 0, untrusted, &handshake).is_err());
    }

    #[test]
    fn a_nonce_serves_one_content() {
        let mut observer = new(true);
        let trusted = (true, true);
        assert!(see(&mut observer, 0, trusted, &datagram(0, b"one")).is_ok());
        assert!(see(&mut observer, 0, trusted, &datagram(0, b"one")).is_ok());
        assert!(see(&mut observer, 0, trusted, &datagram(1, b"two")).is_ok());
        assert!(see(&mut observer, 1, trusted, &datagram(0, b"two")).is_ok());
        assert!(see(&mut observer, 0, trusted, &datagram(0, b"two")).is_err());
    }

    #[test]
    fn inner_addresses_show() {
        let mut observer = new(true);
        let [a, b] = ["10.1.0.1", "10.1.0.2"].map(|a| a.parse().unwrap());
        observer.guard_addresses((a, b));
        let inner = [0x40, 6, 0, 0, 10, 1, 0, 2, 10, 1, 0, 1, 0x4e];
        assert!(see(&mut observer, 0, (true, true), &datagram(0, &inner)).is_err());
        assert!(see(&mut observer, 0, (true, true), &datagram(1, &inner[5..])).is_ok());
    }

    /// A receiver index is drawn, so it may be like a piece of an address; the sequence number behind
    /// it begins with zeros.
    #[test]
    fn a_clear_header_is_no_address_by_chance() {
        let mut observer = new(true);
        let [a, b] = crate::world::addresses();
        for pair in a.into_iter().zip(b) {
            observer.guard_addresses(pair);
        }
        let addresses = a.into_iter().chain(b).map(|address| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        });
        for (seq, address) in addresses.enumerate() {
            for len in 1..=4 {
                let mut header = datagram(seq as u8, b"sealed");
                header[8 - len..8].copy_from_slice(&address[..len]);
                assert_eq!(see(&mut observer, len, (true, true), &header), Ok(()));
                let mut whole = datagram(seq as u8 + 100, b"sealed");
                whole.extend_from_slice(&address);
                let shown = see(&mut observer, len, (true, true), &whole).is_err();
                assert_eq!(shown, address.len() == 16, "one of IPv4 alone is too short");
            }
        }
    }

    #[test]
    fn a_key_shows_wherever_it_stands() {
        let mut observer = new(true);
        let key = std::array::from_fn(|i| i as u8 ^ 0xa5);
        observer.guard(&key);
        let part = datagram(0, &key[5..25]);
        assert!(see(&mut observer, 0, (true, true), &part).is_err());
    }
}
