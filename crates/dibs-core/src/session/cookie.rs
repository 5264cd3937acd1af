//! What guards the handshake's expensive part, as in WireGuard (Donenfeld, "WireGuard", 5.3 and
//! 5.4.4): mac1 proves that the sender knows whom it calls, a cookie that it receives where it
//! claims to send from. HMAC-SHA256 stands for keyed BLAKE2s, and HKDF with ChaCha20-Poly1305
//! under a one-time key for XChaCha20-Poly1305.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use aws_lc_rs::{aead, constant_time, hmac};
use x25519_dalek::PublicKey;

use super::keys::{Secret, Suite, aead_key, expand, extract};
use super::random::{self, Random};
use crate::time::Time;

/// Length of mac1, mac2 and a cookie.
pub(super) const MAC_LEN: usize = 16;
/// Length of the nonce in a cookie reply.
pub(super) const NONCE_LEN: usize = 24;
/// A cookie with its tag.
pub(super) const SEALED_COOKIE_LEN: usize = MAC_LEN + 16;

/// Age at which the secret behind the cookies is replaced, and a cookie no longer used.
pub(super) const COOKIE_LIFETIME: Duration = Duration::from_secs(120);

pub(super) type Mac = [u8; MAC_LEN];

fn mac(key: &hmac::Key, parts: &[&[u8]]) -> Mac {
    let mut context = hmac::Context::with_key(key);
    parts.iter().for_each(|part| context.update(part));
    let mut mac = [0; MAC_LEN];
    mac.copy_from_slice(&context.sign().as_ref()[..MAC_LEN]);
    mac
}

fn equal(a: &Mac, b: &Mac) -> bool {
    constant_time::verify_slices_are_equal(a, b).is_ok()
}

/// The keys that follow from a node's public key, for messages to that node and cookies from it.
pub(super) struct PublicMacs {
    mac1: hmac::Key,
    public: PublicKey,
}

impl PublicMacs {
    pub(super) fn new(public: &PublicKey) -> Self {
        let mut key = [0; 32];
        expand(&extract(&[], public.as_bytes()), &[b"mac1"], &mut key);
        Self {
            mac1: hmac::Key::new(hmac::HMAC_SHA256, &key),
            public: *public,
        }
    }

    pub(super) fn mac1(&self, message: &[u8]) -> Mac {
        mac(&self.mac1, &[message])
    }

    pub(super) fn verify_mac1(&self, message: &[u8], mac1: &Mac) -> bool {
        equal(&self.mac1(message), mac1)
    }

    fn cookie_key(&self, nonce: &[u8; NONCE_LEN]) -> aead::LessSafeKey {
        let mut key = Secret::new([0; 32]);
        let prk = extract(nonce, self.public.as_bytes());
        expand(&prk, &[b"cookie"], key.as_mut_bytes());
        aead_key(Suite::ChaCha20Poly1305, &key)
    }

    /// Encrypts `cookie`, tied to the message whose mac1 is given.
    pub(super) fn seal_cookie(
        &self,
        nonce: &[u8; NONCE_LEN],
        mac1: &Mac,
        cookie: &Mac,
    ) -> [u8; SEALED_COOKIE_LEN] {
        let mut sealed = [0; SEALED_COOKIE_LEN];
        let (text, tag) = sealed.split_at_mut(MAC_LEN);
        text.copy_from_slice(cookie);
        // The key is used once: it follows from the nonce.
        let zero = aead::Nonce::assume_unique_for_key([0; 12]);
        let key = self.cookie_key(nonce);
        let sealed_tag = key
            .seal_in_place_separate_tag(zero, aead::Aad::from(mac1), text)
            .expect("16 bytes are no length to refuse");
        tag.copy_from_slice(sealed_tag.as_ref());
        sealed
    }

    /// The cookie, if this node sealed it for the message whose mac1 is given.
    pub(super) fn open_cookie(
        &self,
        nonce: &[u8; NONCE_LEN],
        mac1: &Mac,
        sealed: &[u8; SEALED_COOKIE_LEN],
    ) -> Option<Mac> {
        let mut text = *sealed;
        let zero = aead::Nonce::assume_unique_for_key([0; 12]);
        let key = self.cookie_key(nonce);
        let cookie = key
            .open_in_place(zero, aead::Aad::from(mac1), &mut text)
            .ok()?;
        Some(cookie.try_into().expect("the length of a cookie"))
    }
}

/// The proof of address that goes with `message`, made from a cookie.
pub(super) fn mac2(cookie: &Mac, message: &[u8]) -> Mac {
    mac(&hmac::Key::new(hmac::HMAC_SHA256, cookie), &[message])
}

/// Makes and checks cookies without keeping any: a MAC of the address under a changing secret.
pub(super) struct CookieJar {
    current: Secret,
    /// The secret before, so that a cookie lives at least [`COOKIE_LIFETIME`].
    previous: Option<Secret>,
    since: Time,
}

impl CookieJar {
    pub(super) fn new(now: Time, rng: &mut dyn Random) -> Self {
        Self {
            current: random::secret(rng),
            previous: None,
            since: now,
        }
    }

    /// The cookie of `source` now.
    pub(super) fn cookie(&mut self, now: Time, source: SocketAddr, rng: &mut dyn Random) -> Mac {
        self.rotate(now, rng);
        cookie(&self.current, source)
    }

    /// Whether `mac2` shows that `source` received a cookie of ours lately.
    pub(super) fn verify(
        &mut self,
        now: Time,
        source: SocketAddr,
        message: &[u8],
        given: &Mac,
        rng: &mut dyn Random,
    ) -> bool {
        self.rotate(now, rng);
        [Some(&self.current), self.previous.as_ref()]
            .into_iter()
            .flatten()
            .any(|secret| equal(&mac2(&cookie(secret, source), message), given))
    }

    fn rotate(&mut self, now: Time, rng: &mut dyn Random) {
        let age = now.since(self.since);
        if age < COOKIE_LIFETIME {
            return;
        }
        let retired = core::mem::replace(&mut self.current, random::secret(rng));
        self.previous = (age < 2 * COOKIE_LIFETIME).then_some(retired);
        self.since = now;
    }
}

fn cookie(secret: &Secret, source: SocketAddr) -> Mac {
    // One address has one form, whichever kind of socket it came in by.
    let ip = match source.ip().to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    mac(&key, &[&ip, &source.port().to_be_bytes()])
}

#[cfg(test)]
mod tests {
    use super::super::random::SeededRandom;
    use super::*;

    const A: &str = "192.0.2.1:5300";

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_cookie_holds_for_one_address_and_port_and_not_for_ever() {
        let rng = &mut SeededRandom::new([1; 32]);
        let mut jar = CookieJar::new(at(0), rng);
        let cookie = jar.cookie(at(119), A.parse().unwrap(), rng);
        let proof = mac2(&cookie, b"message");
        let mut holds = |seconds, source: &str, message: &[u8]| {
            jar.verify(at(seconds), source.parse().unwrap(), message, &proof, rng)
        };
        assert!(holds(119, A, b"message"));
        assert!(!holds(119, "192.0.2.1:5301", b"message"), "another port");
        assert!(!holds(119, "192.0.2.2:5300", b"message"), "another address");
        assert!(!holds(119, A, b"massage"), "another message");
        assert!(
            holds(119, "[::ffff:192.0.2.1]:5300", b"message"),
            "the same address, mapped"
        );
        assert!(holds(230, A, b"message"), "the secret before still counts");
        assert!(!holds(351, A, b"message"));
    }

    #[test]
    fn an_idle_jar_forgets_both_secrets() {
        let rng = &mut SeededRandom::new([1; 32]);
        let mut jar = CookieJar::new(at(0), rng);
        let cookie = jar.cookie(at(0), A.parse().unwrap(), rng);
        let proof = mac2(&cookie, b"message");
        assert!(!jar.verify(at(241), A.parse().unwrap(), b"message", &proof, rng));
    }

    #[test]
    fn a_sealed_cookie_is_tied_to_its_message_and_sender() {
        let server = PublicMacs::new(&PublicKey::from([1; 32]));
        let other = PublicMacs::new(&PublicKey::from([2; 32]));
        let (nonce, mac1, cookie) = ([3; NONCE_LEN], [4; MAC_LEN], [5; MAC_LEN]);
        let sealed = server.seal_cookie(&nonce, &mac1, &cookie);
        assert_eq!(server.open_cookie(&nonce, &mac1, &sealed), Some(cookie));
        assert_eq!(server.open_cookie(&nonce, &[0; MAC_LEN], &sealed), None);
        assert_eq!(server.open_cookie(&[0; NONCE_LEN], &mac1, &sealed), None);
        assert_eq!(other.open_cookie(&nonce, &mac1, &sealed), None);
    }
}
