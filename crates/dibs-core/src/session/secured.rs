//! Secrets in a handshake beside the static keys of both ends, and whether they will do (docs/protocol.md, 2, "Which
//! paths").

use std::sync::Arc;

use dibs_settings::Handshake;

use super::chain::ChainSecret;
use super::handshake::{Dropped, HandshakeOutcome};
use super::keys::{HandshakeKeys, KeyOrigin, Secret};
use super::noise::Noise;
use super::peer::{HandshakePeer, PeerId};
use super::sessions::Sessions;
use crate::time::Time;

impl Sessions {
    /// Why keys are not agreed by a path that is `trusted` or not, with such secrets in them.
    pub(super) fn refusal(
        &self,
        trusted: bool,
        peer: &HandshakePeer,
        used: Option<&ChainSecret>,
    ) -> Option<Dropped> {
        let secured = peer.has_psk || used.is_some_and(ChainSecret::is_sound);
        match self.config.handshake {
            _ if trusted => None,
            Handshake::Trusted => Some(Dropped::Untrusted),
            Handshake::Chained if !secured => Some(Dropped::Unsecured),
            Handshake::Chained | Handshake::Any => None,
        }
    }

    /// Outcome of a handshake that is refused for that.
    pub(super) fn refused(&mut self, now: Time, id: PeerId, reason: Dropped) -> HandshakeOutcome {
        let tells = reason == Dropped::Unsecured && self.tell_unsecured(now, id);
        HandshakeOutcome {
            unsecured: tells.then_some(id),
            ..HandshakeOutcome::from(reason)
        }
    }
}

/// Sets the preshared key of a handshake that has such a secret in it.
pub(super) fn set_psk(noise: &mut Noise, preshared: &Secret, used: Option<&ChainSecret>) {
    match used {
        Some(used) => noise.set_psk(&used.mixed_with(preshared)),
        None => noise.set_psk(preshared),
    }
}

/// Origin of keys that were agreed by a path that both ends call `trusted`, or not.
pub(super) fn origin(trusted: bool, has_psk: bool, used: Option<&ChainSecret>) -> KeyOrigin {
    match used {
        _ if trusted => KeyOrigin::Trusted,
        Some(used) if used.is_sound() => KeyOrigin::Chained,
        _ if has_psk => KeyOrigin::Preshared,
        _ => KeyOrigin::Untrusted,
    }
}

/// Secret that a handshake leaves for later ones.
pub(super) fn chain_secret(keys: &HandshakeKeys, origin: KeyOrigin) -> Arc<ChainSecret> {
    ChainSecret::new(keys, origin != KeyOrigin::Untrusted)
}
