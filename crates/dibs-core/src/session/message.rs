//! The three handshake datagrams. Integers are big endian.
//!
//! ```text
//! message 1, always 1200 bytes, so that no answer is larger than what asked for it:
//!    0  type 1, version u8, suite u8, integrity u8, sender index u32     (the prologue)
//!    8  Noise message 1; payload: timestamp 12, length u16, hello, zeros up to 1038, label u8, number of chain ids
//!       u8, chain ids 8 each, zeros
//! 1168  mac1 16, mac2 16
//! message 2:
//!    0  type 2, chain id used u8, zeros 2, receiver index u32
//!    8  Noise message 2; payload: sender index u32, label u8, hello
//!   -16 mac1 16
//! cookie reply:
//!    0  type 3, zeros 3, receiver index u32, nonce 24, sealed cookie 32
//! ```

use core::time::Duration;

use thiserror::Error;
use zeroize::Zeroizing;

use super::chain::{CHAIN_ID_LEN, ChainId, MOST_NAMED};
use super::cookie::{MAC_LEN, Mac, NONCE_LEN, SEALED_COOKIE_LEN};
use super::keys::{Integrity, Suite};
use super::noise::{MESSAGE_1_OVERHEAD, MESSAGE_2_OVERHEAD};

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const COOKIE_REPLY: u8 = 3;

/// The version of everything on the wire.
pub(super) const VERSION: u8 = 1;

pub(super) const PROLOGUE_LEN: usize = 8;
/// Fits the least MTU of IPv6 (1280).
pub(super) const INITIATION_LEN: usize = 1200;
const INITIATION_NOISE_END: usize = INITIATION_LEN - 2 * MAC_LEN;
const INITIATION_PAYLOAD: usize = INITIATION_NOISE_END - PROLOGUE_LEN - MESSAGE_1_OVERHEAD;
const TIMESTAMP_LEN: usize = 12;
/// Offset of the label, behind the longest hello.
const LABEL_AT: usize = TIMESTAMP_LEN + 2 + MAX_HELLO;
const NAMES_LEN: usize = 2 + MOST_NAMED * CHAIN_ID_LEN;
const RESPONSE_HEADER: usize = 8;
/// The payload of message 2 in front of the hello.
const RESPONSE_FIXED: usize = 5;
const COOKIE_REPLY_LEN: usize = 8 + NONCE_LEN + SEALED_COOKIE_LEN;

/// The longest [`Hello`], in bytes.
pub const MAX_HELLO: usize = 1024;

const _: () = assert!(LABEL_AT + NAMES_LEN == INITIATION_PAYLOAD);
const _: () = assert!(
    RESPONSE_HEADER + MESSAGE_2_OVERHEAD + RESPONSE_FIXED + MAX_HELLO + MAC_LEN <= INITIATION_LEN,
    "no answer larger than its request"
);

/// True if a datagram belongs to the handshake, by its type.
pub fn is_handshake(datagram: &[u8]) -> bool {
    matches!(
        datagram.first(),
        Some(&(INITIATION | RESPONSE | COOKIE_REPLY))
    )
}

/// Hello of an end in the handshake, encrypted and authenticated: trust labels, paths, instance id. The session does
/// not look into it. It may have a secret in it.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Hello(Zeroizing<Vec<u8>>);

/// A hello of more than [`MAX_HELLO`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the hello is {0} bytes long, of {MAX_HELLO} that fit")]
pub struct HelloTooLong(usize);

impl Hello {
    /// Takes up to [`MAX_HELLO`] bytes.
    ///
    /// # Errors
    /// More than that.
    pub fn new(bytes: Vec<u8>) -> Result<Self, HelloTooLong> {
        if bytes.len() > MAX_HELLO {
            Err(HelloTooLong(bytes.len()))
        } else {
            Ok(Self(bytes.into()))
        }
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Wall-clock time of a message 1, ordered as it goes over the wire: seconds and nanoseconds
/// since the Unix epoch, as TAI64N but for the epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Timestamp([u8; TIMESTAMP_LEN]);

impl Timestamp {
    pub(super) fn new(wall: Duration) -> Self {
        let mut bytes = [0; TIMESTAMP_LEN];
        bytes[..8].copy_from_slice(&wall.as_secs().to_be_bytes());
        bytes[8..].copy_from_slice(&wall.subsec_nanos().to_be_bytes());
        Self(bytes)
    }

    /// By how much this is later than `earlier`; zero if it is not.
    pub(super) fn since(self, earlier: Self) -> Duration {
        self.wall().saturating_sub(earlier.wall())
    }

    /// Whatever a peer wrote: it may say more nanoseconds than a second has.
    fn wall(self) -> Duration {
        let (seconds, nanos) = self.0.split_at(8);
        let seconds = u64::from_be_bytes(seconds.try_into().expect("8 bytes"));
        let nanos = u32::from_be_bytes(nanos.try_into().expect("4 bytes"));
        Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()))
    }
}

/// The clear part of message 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Prologue {
    pub(super) version: u8,
    pub(super) suite: u8,
    pub(super) integrity: u8,
    pub(super) sender: u32,
}

impl Prologue {
    pub(super) const fn new(suite: Suite, integrity: Integrity, sender: u32) -> Self {
        Self {
            version: VERSION,
            suite: suite as u8,
            integrity: integrity as u8,
            sender,
        }
    }

    pub(super) const fn bytes(self) -> [u8; PROLOGUE_LEN] {
        let [a, b, c, d] = self.sender.to_be_bytes();
        [
            INITIATION,
            self.version,
            self.suite,
            self.integrity,
            a,
            b,
            c,
            d,
        ]
    }
}

/// A datagram of the handshake, split but not believed.
pub(super) enum Message<'a> {
    Initiation(Initiation<'a>),
    Response(Response<'a>),
    CookieReply(CookieReply<'a>),
}

pub(super) struct Initiation<'a> {
    pub(super) prologue: Prologue,
    pub(super) noise: &'a [u8],
    /// What mac1 covers.
    pub(super) before_mac1: &'a [u8],
    pub(super) mac1: &'a Mac,
    /// What mac2 covers.
    pub(super) before_mac2: &'a [u8],
    pub(super) mac2: &'a Mac,
}

pub(super) struct Response<'a> {
    pub(super) receiver: u32,
    /// Number of the chain id in message 1 whose secret is in it, counted from 1; 0: none.
    pub(super) used: u8,
    pub(super) noise: &'a [u8],
    pub(super) before_mac1: &'a [u8],
    pub(super) mac1: &'a Mac,
}

pub(super) struct CookieReply<'a> {
    pub(super) receiver: u32,
    pub(super) nonce: &'a [u8; NONCE_LEN],
    pub(super) sealed: &'a [u8; SEALED_COOKIE_LEN],
}

impl<'a> Message<'a> {
    /// Splits `datagram`; `None` for what no node of ours sends.
    pub(super) fn parse(datagram: &'a [u8]) -> Option<Self> {
        let (head, _) = datagram.split_first_chunk::<8>()?;
        let [kind, b, c, d, index @ ..] = *head;
        let index = u32::from_be_bytes(index);
        match (kind, [b, c, d]) {
            (INITIATION, [version, suite, integrity]) if datagram.len() == INITIATION_LEN => {
                let (before_mac2, mac2) = datagram.split_last_chunk()?;
                let (before_mac1, mac1) = before_mac2.split_last_chunk()?;
                Some(Self::Initiation(Initiation {
                    prologue: Prologue {
                        version,
                        suite,
                        integrity,
                        sender: index,
                    },
                    noise: &before_mac1[PROLOGUE_LEN..],
                    before_mac1,
                    mac1,
                    before_mac2,
                    mac2,
                }))
            }
            (RESPONSE, [used, 0, 0])
                if usize::from(used) <= MOST_NAMED && datagram.len() <= INITIATION_LEN =>
            {
                let (before_mac1, mac1) = datagram.split_last_chunk()?;
                let noise = before_mac1.get(RESPONSE_HEADER..)?;
                Some(Self::Response(Response {
                    receiver: index,
                    used,
                    noise,
                    before_mac1,
                    mac1,
                }))
            }
            (COOKIE_REPLY, [0, 0, 0]) if datagram.len() == COOKIE_REPLY_LEN => {
                let (nonce, sealed) = datagram[8..].split_first_chunk()?;
                let sealed = sealed.try_into().ok()?;
                Some(Self::CookieReply(CookieReply {
                    receiver: index,
                    nonce,
                    sealed,
                }))
            }
            _ => None,
        }
    }
}

/// Content of message 1's payload.
pub(super) struct Call {
    pub(super) timestamp: Timestamp,
    pub(super) hello: Hello,
    /// How the initiator labels the path that it calls by.
    pub(super) trusted: bool,
    /// The secrets of earlier handshakes that it holds.
    pub(super) named: Vec<ChainId>,
}

/// Content of message 2's payload.
pub(super) struct Answer {
    /// The responder's index.
    pub(super) sender: u32,
    /// How the responder labels the path that message 1 came by.
    pub(super) trusted: bool,
    pub(super) hello: Hello,
}

/// A label on the wire.
const fn label(byte: u8) -> Option<bool> {
    match byte {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// Builds message 1. `noise` writes the Noise message with the payload it is given; `macs`
/// gives mac1 of what comes before it, and then mac2 of what comes before that.
pub(super) fn emit_initiation(
    prologue: Prologue,
    call: &Call,
    noise: impl FnOnce(&[u8], &mut [u8]),
    mac1: impl FnOnce(&[u8]) -> Mac,
    mac2: impl FnOnce(&[u8]) -> Mac,
) -> Vec<u8> {
    let mut payload = Zeroizing::new(Vec::with_capacity(INITIATION_PAYLOAD));
    payload.extend_from_slice(&call.timestamp.0);
    payload.extend_from_slice(&(call.hello.0.len() as u16).to_be_bytes());
    payload.extend_from_slice(&call.hello.0);
    payload.resize(LABEL_AT, 0);
    payload.extend_from_slice(&[call.trusted.into(), call.named.len() as u8]);
    for id in &call.named {
        payload.extend_from_slice(id.as_bytes());
    }
    payload.resize(INITIATION_PAYLOAD, 0);

    let mut out = vec![0; INITIATION_NOISE_END];
    out[..PROLOGUE_LEN].copy_from_slice(&prologue.bytes());
    noise(&payload, &mut out[PROLOGUE_LEN..]);
    let mac1 = mac1(&out);
    out.extend_from_slice(&mac1);
    let mac2 = mac2(&out);
    out.extend_from_slice(&mac2);
    out
}

/// The payload of message 1.
pub(super) fn parse_initiation_payload(payload: &[u8]) -> Option<Call> {
    let (said, names) = payload.split_at_checked(LABEL_AT)?;
    let (timestamp, rest) = said.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let hello = rest.get(..usize::from(u16::from_be_bytes(*length)))?;
    let ([trusted, count], ids) = names.split_first_chunk()?;
    let ids = ids.as_chunks().0.get(..usize::from(*count))?;
    Some(Call {
        timestamp: Timestamp(*timestamp),
        hello: Hello::new(hello.to_vec()).ok()?,
        trusted: label(*trusted)?,
        named: ids.iter().copied().map(ChainId::new).collect(),
    })
}

/// Builds message 2, as [`emit_initiation`] does message 1.
pub(super) fn emit_response(
    receiver: u32,
    used: u8,
    answer: &Answer,
    noise: impl FnOnce(&[u8], &mut [u8]),
    mac1: impl FnOnce(&[u8]) -> Mac,
) -> Vec<u8> {
    let hello = &answer.hello.0;
    let mut payload = Zeroizing::new(Vec::with_capacity(RESPONSE_FIXED + hello.len()));
    payload.extend_from_slice(&answer.sender.to_be_bytes());
    payload.push(answer.trusted.into());
    payload.extend_from_slice(hello);

    let mut out = vec![0; RESPONSE_HEADER + MESSAGE_2_OVERHEAD + payload.len()];
    out[..2].copy_from_slice(&[RESPONSE, used]);
    out[4..8].copy_from_slice(&receiver.to_be_bytes());
    noise(&payload, &mut out[RESPONSE_HEADER..]);
    let mac1 = mac1(&out);
    out.extend_from_slice(&mac1);
    out
}

/// The payload of message 2.
pub(super) fn parse_response_payload(payload: &[u8]) -> Option<Answer> {
    let (sender, rest) = payload.split_first_chunk()?;
    let (trusted, hello) = rest.split_first()?;
    Some(Answer {
        sender: u32::from_be_bytes(*sender),
        trusted: label(*trusted)?,
        hello: Hello::new(hello.to_vec()).ok()?,
    })
}

/// Builds a cookie reply.
pub(super) fn emit_cookie_reply(
    receiver: u32,
    nonce: &[u8; NONCE_LEN],
    sealed: &[u8; SEALED_COOKIE_LEN],
) -> Vec<u8> {
    let mut out = vec![COOKIE_REPLY, 0, 0, 0];
    out.extend_from_slice(&receiver.to_be_bytes());
    out.extend_from_slice(nonce);
    out.extend_from_slice(sealed);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn timestamps_order_as_the_time_does() {
        let at = |s, n| Timestamp::new(Duration::new(s, n));
        assert!(at(1, 999_999_999) < at(2, 0));
        assert!(at(2, 255) < at(2, 256));
        assert!(at(255, 0) < at(256, 0));
    }

    #[test]
    fn a_hello_has_a_bound() {
        assert!(Hello::new(vec![0; MAX_HELLO]).is_ok());
        let refused = Hello::new(vec![0; MAX_HELLO + 1]).err();
        assert_eq!(refused, Some(HelloTooLong(MAX_HELLO + 1)));
    }

    #[test]
    fn reserved_bytes_and_wrong_lengths_are_refused() {
        let reply = emit_cookie_reply(1, &[0; NONCE_LEN], &[0; SEALED_COOKIE_LEN]);
        assert!(Message::parse(&reply).is_some());
        assert!(Message::parse(&reply[..reply.len() - 1]).is_none());
        for reserved in 1..4 {
            let mut reply = reply.clone();
            reply[reserved] = 1;
            assert!(Message::parse(&reply).is_none());
        }
    }

    proptest! {
        #[test]
        fn parsers_stand_any_bytes(
            kind in 0..8u8,
            zeros in any::<bool>(),
            mut bytes in proptest::collection::vec(any::<u8>(), 0..1300),
            exact in prop_oneof![Just(None), Just(Some(INITIATION_LEN)), Just(Some(64))],
        ) {
            if let Some(length) = exact {
                bytes.resize(length, 0);
            }
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            if zeros && bytes.len() >= 4 {
                bytes[1..4].fill(0);
            }
            let expected = is_handshake(&bytes) && (kind != INITIATION || bytes.len() == INITIATION_LEN);
            prop_assert!(Message::parse(&bytes).is_none() || expected);
            let _ = parse_initiation_payload(&bytes);
            let _ = parse_response_payload(&bytes);
        }
    }
}
