//! Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s by `snow`, with the ephemeral key drawn by the caller.
//!
//! A handshake lies in a place of its own and does not move, so nothing of it stays behind where it was;
//! its keys wipe themselves, and what `snow` itself keeps (chaining key, preshared key) is written over
//! when it is dropped. Copies on the stack, which `snow` makes of them as it calculates, are left to the calls
//! that follow.

use snow::params::NoiseParams;
use snow::{Builder, HandshakeState};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

use super::keys::{HandshakeKeys, Secret};
use super::primitives::Wiping;

const PATTERN: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
/// A pattern that begins without any key.
const KEYLESS: &str = "Noise_NN_25519_ChaChaPoly_BLAKE2s";
/// The preshared key enters at the end of message 2.
const PSK_POSITION: u8 = 2;

/// What message 1 adds to its payload: ephemeral key, encrypted static key, tag.
pub(super) const MESSAGE_1_OVERHEAD: usize = 32 + 48 + 16;
/// What message 2 adds to its payload: ephemeral key, tag.
pub(super) const MESSAGE_2_OVERHEAD: usize = 32 + 16;

/// A message that does not come from who it should.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unauthentic;

/// One handshake under way.
pub(super) struct Noise(Box<HandshakeState>);

impl Noise {
    pub(super) fn initiator(
        local: &StaticSecret,
        remote: &PublicKey,
        prologue: &[u8],
        ephemeral: Secret,
    ) -> Self {
        let state = builder(local, prologue, ephemeral)
            .and_then(|b| b.remote_public_key(remote.as_bytes()))
            .and_then(Builder::build_initiator);
        Self::boxed(state)
    }

    pub(super) fn responder(local: &StaticSecret, prologue: &[u8], ephemeral: Secret) -> Self {
        Self::boxed(builder(local, prologue, ephemeral).and_then(Builder::build_responder))
    }

    /// What is moved here has no secret yet but in boxes.
    fn boxed(state: Result<HandshakeState, snow::Error>) -> Self {
        Self(Box::new(
            state.expect("every part that the pattern needs is given"),
        ))
    }

    /// Sets the preshared key, before message 2 is written or read: only then it is known which one that is.
    pub(super) fn set_psk(&mut self, psk: &Secret) {
        let set = self.0.set_psk(usize::from(PSK_POSITION), psk.as_bytes());
        set.expect("32 bytes at a position of the pattern");
    }

    /// Writes over all of it with a state that knows no key.
    fn wipe(&mut self) {
        *self.0 = keyless();
        // Without this the compiler may find that nobody reads what was written.
        core::hint::black_box(&mut *self.0);
    }

    /// The static key of the other end, once it is known.
    pub(super) fn remote_static(&self) -> Option<PublicKey> {
        let bytes: [u8; 32] = self.0.get_remote_static()?.try_into().ok()?;
        Some(PublicKey::from(bytes))
    }

    /// Writes our next message with `payload` inside; `out` has the exact length of it.
    pub(super) fn write(&mut self, payload: &[u8], out: &mut [u8]) {
        let written = self.0.write_message(payload, out);
        let written = written.expect("our turn, keys set, room given");
        debug_assert_eq!(written, out.len());
    }

    /// Reads the other end's message; returns the payload. A failure leaves the state as it was,
    /// so that a forged message does not keep the true one out.
    pub(super) fn read(&mut self, message: &[u8]) -> Result<Zeroizing<Vec<u8>>, Unauthentic> {
        let mut payload = Zeroizing::new(vec![0; message.len()]);
        let read = self
            .0
            .read_message(message, &mut payload)
            .map_err(|_| Unauthentic)?;
        payload.truncate(read);
        Ok(payload)
    }

    /// The keys, after message 2.
    pub(super) fn finish(mut self) -> HandshakeKeys {
        assert!(
            self.0.is_handshake_finished(),
            "keys exist only after message 2"
        );
        let (initiator, responder) = self.0.dangerously_get_raw_split();
        let (initiator, responder) = (Zeroizing::new(initiator), Zeroizing::new(responder));
        HandshakeKeys {
            hash: self
                .0
                .get_handshake_hash()
                .try_into()
                .expect("BLAKE2s gives 32 bytes"),
            initiator: Secret::new(*initiator),
            responder: Secret::new(*responder),
        }
    }
}

impl Drop for Noise {
    fn drop(&mut self) {
        self.wipe();
    }
}

fn builder<'a>(
    local: &'a StaticSecret,
    prologue: &'a [u8],
    ephemeral: Secret,
) -> Result<Builder<'a>, snow::Error> {
    let params: NoiseParams = PATTERN.parse()?;
    Builder::with_resolver(params, Box::new(Wiping::with_ephemeral(ephemeral)))
        .prologue(prologue)?
        .local_private_key(local.as_bytes())
}

/// The beginning of a handshake that nobody has a part in.
fn keyless() -> HandshakeState {
    let params = KEYLESS.parse();
    let state = params.and_then(|params: NoiseParams| {
        Builder::with_resolver(params, Box::new(Wiping::without_keys())).build_initiator()
    });
    state.expect("the pattern needs no key")
}

#[cfg(test)]
mod tests {
    use super::super::keys::{Suite, aead_key};
    use super::super::testing::hex;
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::from_slice(&hex(text))
    }

    /// RFC 7748, 5.2 and 6.1.
    #[test]
    fn x25519_rfc_7748() {
        let x25519 = |scalar: &str, u: &str| {
            let bytes = |t| -> [u8; 32] { hex(t).try_into().unwrap() };
            x25519_dalek::x25519(bytes(scalar), bytes(u)).to_vec()
        };
        assert_eq!(
            x25519(
                "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
                "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            ),
            hex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"),
        );
        let (alice, bob) = (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
        );
        let public = |t| PublicKey::from(&StaticSecret::from(*secret(t).as_bytes()));
        let shared = |ours, theirs| {
            let ours = StaticSecret::from(*secret(ours).as_bytes());
            ours.diffie_hellman(&public(theirs)).as_bytes().to_vec()
        };
        let k = hex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742");
        assert_eq!(shared(alice, bob), k);
        assert_eq!(shared(bob, alice), k);
    }

    /// Two handshakes with different keys leave the same behind: nothing of either.
    #[test]
    fn a_handshake_that_ended_is_written_over() {
        let ended = |seed: u8| {
            let key = |n| StaticSecret::from([seed + n; 32]);
            let psk = Secret::new([seed + 2; 32]);
            let ephemeral = |n| Secret::new([seed + n; 32]);
            let (local, remote) = (key(0), PublicKey::from(&key(1)));
            let mut initiator = Noise::initiator(&local, &remote, b"dibs", ephemeral(3));
            let mut responder = Noise::responder(&key(1), b"dibs", ephemeral(4));
            let mut message = vec![0; MESSAGE_1_OVERHEAD];
            initiator.write(&[], &mut message);
            responder.read(&message).unwrap();
            responder.set_psk(&psk);
            let mut message = vec![0; MESSAGE_2_OVERHEAD];
            responder.write(&[], &mut message);
            initiator.set_psk(&psk);
            initiator.read(&message).unwrap();
            [initiator, responder]
        };
        let left = |noise: &mut Noise| {
            // The chaining key, as far as it can be told from outside, and the transcript.
            let keys = noise.0.dangerously_get_raw_split();
            (keys, noise.0.get_handshake_hash().to_vec())
        };
        for (mut one, mut other) in ended(10).into_iter().zip(ended(20)) {
            assert_ne!(left(&mut one), left(&mut other));
            one.wipe();
            other.wipe();
            assert_eq!(left(&mut one), left(&mut other));
            assert_eq!(one.remote_static(), None);
        }
    }

    /// The published vector of the "cacophony" set for this pattern.
    #[test]
    fn noise_ikpsk2_cacophony() {
        let prologue = hex("4a6f686e2047616c74");
        let psk = secret("54686973206973206d7920417573747269616e20706572737065637469766521");
        let static_secret = |t| StaticSecret::from(*secret(t).as_bytes());
        let remote: [u8; 32] =
            hex("31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62")
                .try_into()
                .unwrap();
        let mut initiator = Noise::initiator(
            &static_secret("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"),
            &PublicKey::from(remote),
            &prologue,
            secret("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"),
        );
        let mut responder = Noise::responder(
            &static_secret("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"),
            &prologue,
            secret("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"),
        );

        let payload = hex("4c756477696720766f6e204d69736573");
        let mut message = vec![0; payload.len() + MESSAGE_1_OVERHEAD];
        initiator.write(&payload, &mut message);
        assert_eq!(
            message,
            hex(
                "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944
                 001e21de9f98ddd8e2ad57527207feb56253c9c94a9e496782ecfcb2a75fbcaf
                 1b52948cc48daefe660c62119ab5000980c84831215f2441eba616548e832985
                 464cf17e51ee93109008399a21f7e13f"
            )
        );
        assert_eq!(*responder.read(&message).unwrap(), payload);

        responder.set_psk(&psk);
        initiator.set_psk(&psk);
        let payload = hex("4d757272617920526f746862617264");
        let mut message = vec![0; payload.len() + MESSAGE_2_OVERHEAD];
        responder.write(&payload, &mut message);
        assert_eq!(
            message,
            hex(
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843
                 cb765f2caef0751b8f007572dab0322217755c0632f365717edbf34d33e87a"
            )
        );
        assert_eq!(*initiator.read(&message).unwrap(), payload);

        let (initiator, responder) = (initiator.finish(), responder.finish());
        let hash = hex("f5191b875290abcd41347ac3622d9679688a7e980229cb937ef748336cfde0e5");
        assert_eq!(initiator.hash.as_slice(), hash);
        assert_eq!(responder.hash.as_slice(), hash);

        // The first transport message: payload "F. A. Hayek" under nonce 0 of the initiator.
        let key = aead_key(Suite::ChaCha20Poly1305, &initiator.initiator);
        let mut text = hex("462e20412e20486179656b");
        let nonce = aws_lc_rs::aead::Nonce::assume_unique_for_key([0; 12]);
        let tag = key
            .seal_in_place_separate_tag(nonce, aws_lc_rs::aead::Aad::empty(), &mut text)
            .unwrap();
        text.extend_from_slice(tag.as_ref());
        assert_eq!(
            text,
            hex("8153ca9833bc3c1b91a7e66e5f4d4f5b59bf9e64c2f20d15f0bba7")
        );
    }
}
