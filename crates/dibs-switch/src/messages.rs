//! What the daemons of two hosts say to each other, over [`Node::send_control`].
//!
//! The node delivers each message once, authenticated and encrypted, but in any order. All numbers are
//! big-endian.
//!
//! ```text
//! message  = version:8 (1)  kind:8  request:32  body
//! body of kind 1, WANT    = sequence:64  bumps:16  count:8  count * device
//!   device                = bump:8  length:8  name
//! body of kind 2, SWITCH  = bump:8  flags:8  host:64  count:8  count * entry
//!   entry                 = family:8 (4 or 6)  address of the sender  address of the receiver
//!                           port of the sender:16  port of the receiver:16
//!                           socket of the receiver:32  generation:64
//! body of kind 3, ANSWER  = count:8  count * (outcome:8  generation:64; of OwnRule the rule's bump, of
//!                           OtherSocket the socket)
//! body of kind 4, CONFIRM = bump:8  count:8  count * (entry without generation)
//! body of kind 5, SILENT  = sequence:64  count:8  count * (bump:8 (bit 128: refuses)  port:16)
//! body of kind 6, KNOCK   = count:8  count * (entry without generation  seq:32  ack:32)
//! body of kind 7, MATCH   = count:8  count * (entry without generation  flags:8  seq:32  ack:32  TSval:32  TSecr:32)
//! body of kind 8, MEASURE = run:64  flags:8  count:8  count * path:8
//! body of kind 9, SEEK    = count:8  count * port:16
//! body of kind 10, HIDE   = count:8  count * (entry without generation)
//! ```
//!
//! WANT says which bumps (bit n for bump n) the sender's rules put connections of this peer into, so
//! that the receiver has their TUNs ready; the highest sequence since the sender's start counts. It also
//! names the sender's bumps that are devices, whose numbers are each host's own: the receiver takes a number
//! in any message for its own bump of that name. SWITCH
//! says what connections are on from now on; bump 0 releases them. Flag 1: an explicit choice, which
//! stands above rules and is kept. Both are answered with the same request number: SWITCH with an
//! outcome for each entry in order, WANT with one. Flag 2: the sender has something under
//! way by a bump, and leaves first. The receiver says whether it would follow, and gets ready: what it
//! sends itself falls silent. CONFIRM says that the sender has connections on a bump, and asks whether the
//! receiver has them there too; once both know, either may refuse what does not come by the bump. It is
//! answered as SWITCH is, with generation 0. SILENT names all ports of the sender whose kernel does not answer what
//! the receiver sends there by a bump: mostly a firewall drops it. The highest sequence counts, as with WANT; it is
//! answered with one outcome. KNOCK says that the sender sends an acknowledgement of these numbers
//! in plain, and asks whether it arrives; the number beside the answer Done has the numbers of the receiver's own
//! ([`crate::knock`]). MATCH asks the receiver to find the connections that the sender calls so, whose kernel says these
//! numbers, and which the receiver knows by other addresses ([`crate::matching`]); flag 1: the connection has time stamps. It
//! names no socket. After Done, messages name these connections by the sender's addresses. SEEK asks the receiver for a MATCH of its
//! connections to these ports of the sender, who knows them by addresses of a router. It is answered with one outcome;
//! beside Done stands the number of connections that were not matched before. HIDE names connections that a rule of the sender
//! requires on a bump: for [`HIDDEN_FOR`](crate::shadow::HIDDEN_FOR) the receiver shows nothing of them in plain. It is answered as
//! CONFIRM is. MEASURE asks for load on paths
//! ([`Node::measure`]). Flag 1: the user named them, so they may cost something. It is answered with one outcome, and
//! after Done with the round trip of each path under way in microseconds.
//!
//! A message may be on its way for long, and a connection end meanwhile and another one take its ports.
//! So an entry names the receiver's socket, by a number that the receiver gave it; 0 where it has not been
//! asked. Where that is not the socket of the connection, it answers OtherSocket with the number, and does
//! nothing. The sender says it again with the number if its own socket is still the one that it meant:
//! both sockets were there when the answer was made, so they are the two ends of one connection.
//!
//! [`Node::send_control`]: dibs_core::node::Node::send_control
//! [`Node::measure`]: dibs_core::node::Node::measure

use dibs_wire::FlowKey;
use std::net::IpAddr;
use std::time::Duration;

use dibs_core::node::{ControlError, MAX_CONTROL, MAX_SILENT};
use dibs_settings::BumpId;

use crate::conns::{Socket, Version};
use crate::knock::Numbers;
use crate::matching::Stand;
use crate::silence::Port;

const VERSION: u8 = 1;
const WANT: u8 = 1;
const SWITCH: u8 = 2;
const ANSWER: u8 = 3;
const CONFIRM: u8 = 4;
const SILENT: u8 = 5;
const KNOCK: u8 = 6;
const MATCH: u8 = 7;
const MEASURE: u8 = 8;
const SEEK: u8 = 9;
const HIDE: u8 = 10;
/// Bit beside a bump's number in SILENT: the port refuses.
const REFUSES: u8 = 0x80;
const NAMED: u8 = 1;
const STAMPED: u8 = 1;
const EXPLICIT: u8 = 1;
const READY: u8 = 2;
const FORCE: u8 = 4;
const RENUMBERED: u8 = 8;

/// Connections in one SWITCH, at most.
pub const MAX_ENTRIES: usize = 20;
/// Connections in one MATCH, at most.
pub const MAX_MATCHES: usize = 16;
/// Ports in one SEEK, at most.
pub const MAX_SOUGHT: usize = 16;
/// Paths in one MEASURE, at most: as many as lead to a peer.
pub const MAX_MEASURED: usize = 16;

/// Bumps that are devices, at most: they are numbered from 8 to 14.
pub const MAX_DEVICES: usize = 7;
/// Bytes of a bump's name, at most.
const MAX_NAME: usize = 32;

const HEADER: usize = 6;
const LONGEST_ENTRY: usize = 1 + 2 * 16 + 2 * 2 + 4 + 8;
const _: () = assert!(HEADER + 8 + 1 + MAX_SILENT * 3 <= MAX_CONTROL);
const _: () = assert!(HEADER + 11 + MAX_ENTRIES * LONGEST_ENTRY <= MAX_CONTROL);
const _: () = assert!(HEADER + 1 + MAX_MATCHES * (LONGEST_ENTRY - 8 + 17) <= MAX_CONTROL);

/// A message, see the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Names a question and its answer; the asker's choice.
    pub request: u32,
    /// Body.
    pub body: Body,
}

/// A connection that a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// As the sender sends.
    pub pair: FlowKey,
    /// The receiver's.
    pub socket: Socket,
}

/// Fields of a SWITCH that hold for all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// The bump that they are on from now on; none: plain.
    pub bump: Option<BumpId>,
    /// A user's choice, as opposed to a rule's.
    pub explicit: bool,
    /// Only whether the receiver would do it; it gets ready.
    pub ready: bool,
    /// If they go to plain: why they may.
    pub ground: Ground,
}

impl Switch {
    /// True if they go to plain only where it carries them.
    pub fn needs_plain(&self) -> bool {
        self.bump.is_none() && self.ground == Ground::Proved
    }
}

/// Ground on which connections may go to plain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ground {
    /// Plain was seen to carry them.
    #[default]
    Proved,
    /// A user has said so, whether plain carries them or not.
    Forced,
    /// Something in plain changes their numbers, so no bump carries them.
    Renumbered,
}

impl Ground {
    /// Ground of a move that a user may have forced.
    pub fn forced(force: bool) -> Self {
        match force {
            true => Self::Forced,
            false => Self::Proved,
        }
    }

    /// Flag of a SWITCH.
    fn flag(self) -> u8 {
        match self {
            Self::Proved => 0,
            Self::Forced => FORCE,
            Self::Renumbered => RENUMBERED,
        }
    }
}

/// See [`Message`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Bumps that the sender's rules use.
    Want {
        /// Grows with each WANT since the sender started.
        sequence: u64,
        /// Bit n for bump n.
        bumps: u16,
        /// The numbers and names of up to [`MAX_DEVICES`] bumps that are devices.
        devices: Vec<(BumpId, String)>,
    },
    /// Where connections are from now on.
    Switch {
        /// Where they are.
        switch: Switch,
        /// Up to [`MAX_ENTRIES`] connections, with the version of the choice.
        conns: Vec<(Named, Version)>,
    },
    /// Which connections are on a bump here.
    Confirm {
        /// The bump.
        bump: BumpId,
        /// Up to [`MAX_ENTRIES`] connections.
        conns: Vec<Named>,
    },
    /// Ports of the sender that do not answer what the receiver sends there.
    Silent {
        /// Grows with each SILENT since the sender started.
        sequence: u64,
        /// All of them, up to [`MAX_SILENT`].
        ports: Vec<Port>,
    },
    /// Acknowledgements that the sender sends in plain.
    Knock(
        /// Up to [`MAX_ENTRIES`] connections, with the numbers of each acknowledgement.
        Vec<(Named, Numbers)>,
    ),
    /// Connections in plain that the receiver knows by other addresses.
    Match(
        /// Up to [`MAX_MATCHES`] connections, as the sender sends, and where each stands.
        Vec<(FlowKey, Stand)>,
    ),
    /// Connections in plain that the sender knows by addresses of a router, and the receiver by its own.
    Seek(
        /// Up to [`MAX_SOUGHT`] ports of the sender.
        Vec<u16>,
    ),
    /// Connections that the receiver is to show nothing of in plain.
    Hide(
        /// Up to [`MAX_ENTRIES`] connections.
        Vec<Named>,
    ),
    /// Paths that the receiver is to put load on.
    Measure {
        /// Number of the measurement.
        run: u64,
        /// The user named them.
        named: bool,
        /// Up to [`MAX_MEASURED`] paths, by their ids; none: the load ends.
        paths: Vec<u8>,
    },
    /// What came of a question.
    Answer(Vec<(Outcome, u64)>),
}

impl Body {
    /// Connections that it names, by names that both hosts know.
    pub fn named_mut(&mut self) -> Box<dyn Iterator<Item = &mut Named> + '_> {
        match self {
            Self::Switch { conns, .. } => Box::new(conns.iter_mut().map(|(named, _)| named)),
            Self::Confirm { conns, .. } | Self::Hide(conns) => Box::new(conns.iter_mut()),
            Self::Knock(conns) => Box::new(conns.iter_mut().map(|(named, _)| named)),
            Self::Want { .. }
            | Self::Silent { .. }
            | Self::Match(_)
            | Self::Seek(_)
            | Self::Measure { .. }
            | Self::Answer(_) => Box::new(std::iter::empty()),
        }
    }

    /// Time after which it is not sent any more: the `patience` of whoever asks. None if it says what stands, and the latest counts: it
    /// is to arrive although nobody waits for the answer.
    pub fn expires(&self, patience: Duration) -> Option<Duration> {
        let lasts = matches!(self, Self::Want { .. } | Self::Silent { .. });
        (!lasts).then_some(patience)
    }
}

/// Outcome of a SWITCH for one connection. Beside it stands the generation known afterwards; of
/// [`OwnRule`](Outcome::OwnRule) the bump that the rule wants, of [`OtherSocket`](Outcome::OtherSocket) the socket, and
/// of a KNOCK that is [`Done`](Outcome::Done) the [numbers](Numbers::to_wire) of the answerer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// It is so now.
    Done = 0,
    /// A later choice stands.
    Older = 1,
    /// No such connection here.
    NoConnection = 2,
    /// A rule of this host wants the bump.
    OwnRule = 3,
    /// This host does not carry the bump.
    NoBump = 4,
    /// The socket is bound to a device and cannot be steered.
    Bound = 5,
    /// The system did not let this host.
    Failed = 6,
    /// The connection has another socket here than the one named.
    OtherSocket = 7,
    /// The bump's device is not there, or not ready.
    NoDevice = 8,
    /// Something that was sent in plain did not arrive: an acknowledgement, or what shows routers all that went by a bump.
    NotHeard = 9,
    /// Something on the way gives the connection other numbers, or answers in the other end's place.
    Renumbered = 10,
    /// Several connections here fit one of the peer.
    Ambiguous = 11,
}

impl Outcome {
    fn from_wire(byte: u8) -> Option<Self> {
        use Outcome::*;
        let all = [
            Done,
            Older,
            NoConnection,
            OwnRule,
            NoBump,
            Bound,
            Failed,
            OtherSocket,
            NoDevice,
            NotHeard,
            Renumbered,
            Ambiguous,
        ];
        all.into_iter().find(|outcome| *outcome as u8 == byte)
    }
}

/// How long a peer's daemon has for an answer: on a busy machine it waits for iptables for seconds. `dibsctl`
/// waits longer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A peer's answer for one connection; the number belongs to the outcome.
pub type Answer = Result<(Outcome, u64), Unanswered>;

/// Why a peer's daemon gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// There was no session to ask by.
    #[error("there is no session with the peer: see dibsctl peer list")]
    NoSession,
    /// It may have done its part all the same.
    #[error("the peer did not answer within {} s: see the log of dibsd there", ANSWER_TIMEOUT.as_secs())]
    Silent,
    /// It is the peer's doing that messages wait, or that of the trusted paths between the hosts.
    #[error("too many messages wait for the peer: repeat the command")]
    Full,
    /// There is no data path to ask by.
    #[error("dibsd is stopping, or starts again: repeat the command")]
    Ended,
    /// It was silent for others.
    #[error(
        "not tried, because the peer did not answer for earlier connections: repeat the command"
    )]
    NotAsked,
}

impl From<ControlError> for Unanswered {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::NoSession => Self::NoSession,
            ControlError::TooMany => Self::Full,
            ControlError::UnknownPeer | ControlError::TooLong => {
                panic!("messages are short and for known peers: {error}")
            }
        }
    }
}

/// The peer's fault: bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a message of this version")]
pub struct Malformed;

impl Message {
    /// The bytes of the message.
    ///
    /// # Panics
    /// If it has more than [`MAX_ENTRIES`] entries, or a pair of mixed families.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION, 0];
        out.extend(self.request.to_be_bytes());
        match &self.body {
            Body::Want {
                sequence,
                bumps,
                devices,
            } => {
                out[1] = WANT;
                out.extend(sequence.to_be_bytes());
                out.extend(bumps.to_be_bytes());
                assert!(devices.len() <= MAX_DEVICES, "more devices than numbers");
                out.push(devices.len() as u8);
                for (bump, name) in devices {
                    assert!(name.len() <= MAX_NAME, "a name is {MAX_NAME} bytes long");
                    out.extend([bump.get(), name.len() as u8]);
                    out.extend(name.as_bytes());
                }
            }
            Body::Switch { switch, conns } => {
                out[1] = SWITCH;
                let flag = |flag, set| if set { flag } else { 0 };
                let flags = flag(EXPLICIT, switch.explicit)
                    | flag(READY, switch.ready)
                    | switch.ground.flag();
                out.extend([switch.bump.map_or(0, BumpId::get), flags]);
                let host = conns.first().map_or(0, |(_, version)| version.host);
                out.extend(host.to_be_bytes());
                out.push(count(conns.len()));
                for (named, version) in conns {
                    assert_eq!(
                        version.host, host,
                        "one host makes the choices of a message"
                    );
                    put_named(&mut out, named);
                    out.extend(version.generation.to_be_bytes());
                }
            }
            Body::Confirm { bump, conns } => {
                out[1] = CONFIRM;
                out.push(bump.get());
                put_all(&mut out, conns);
            }
            Body::Silent { sequence, ports } => {
                out[1] = SILENT;
                out.extend(sequence.to_be_bytes());
                assert!(ports.len() <= MAX_SILENT, "a node names {MAX_SILENT} ports");
                out.push(ports.len() as u8);
                for at in ports {
                    out.push(at.bump.get() | if at.refuses { REFUSES } else { 0 });
                    out.extend(at.port.to_be_bytes());
                }
            }
            Body::Knock(conns) => {
                out[1] = KNOCK;
                out.push(count(conns.len()));
                for (named, numbers) in conns {
                    put_named(&mut out, named);
                    out.extend(numbers.to_wire().to_be_bytes());
                }
            }
            Body::Match(conns) => {
                out[1] = MATCH;
                assert!(conns.len() <= MAX_MATCHES, "more connections than fit");
                out.push(conns.len() as u8);
                conns.iter().for_each(|shown| put_shown(&mut out, shown));
            }
            Body::Seek(ports) => {
                out[1] = SEEK;
                assert!(ports.len() <= MAX_SOUGHT, "more ports than fit");
                out.push(ports.len() as u8);
                out.extend(ports.iter().flat_map(|port| port.to_be_bytes()));
            }
            Body::Hide(conns) => {
                out[1] = HIDE;
                put_all(&mut out, conns);
            }
            Body::Measure { run, named, paths } => {
                out[1] = MEASURE;
                out.extend(run.to_be_bytes());
                assert!(paths.len() <= MAX_MEASURED, "more paths than to a peer");
                out.extend([if *named { NAMED } else { 0 }, paths.len() as u8]);
                out.extend(paths);
            }
            Body::Answer(outcomes) => {
                out[1] = ANSWER;
                out.push(count(outcomes.len()));
                for (outcome, generation) in outcomes {
                    out.push(*outcome as u8);
                    out.extend(generation.to_be_bytes());
                }
            }
        }
        out
    }

    /// Reads a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        if r.u8()? != VERSION {
            return Err(Malformed);
        }
        let kind = r.u8()?;
        let request = r.u32()?;
        let body = match kind {
            WANT => Body::Want {
                sequence: r.u64()?,
                bumps: r.u16()?,
                devices: r.devices()?,
            },
            SWITCH => {
                let bump = match r.u8()? {
                    0 => None,
                    number => Some(BumpId::new(number).ok_or(Malformed)?),
                };
                let flags = r.u8()?;
                let ground = match flags & !(EXPLICIT | READY) {
                    0 => Ground::Proved,
                    FORCE => Ground::Forced,
                    RENUMBERED => Ground::Renumbered,
                    _ => return Err(Malformed),
                };
                let host = r.u64()?;
                let conns = (0..r.count()?).map(|_| {
                    let named = r.named()?;
                    let generation = r.u64()?;
                    Ok((named, Version { generation, host }))
                });
                Body::Switch {
                    switch: Switch {
                        bump,
                        explicit: flags & EXPLICIT != 0,
                        ready: flags & READY != 0,
                        ground,
                    },
                    conns: conns.collect::<Result<_, _>>()?,
                }
            }
            CONFIRM => {
                let bump = BumpId::new(r.u8()?).ok_or(Malformed)?;
                let conns = r.all_named()?;
                Body::Confirm { bump, conns }
            }
            SILENT => Body::Silent {
                sequence: r.u64()?,
                ports: r.ports()?,
            },
            KNOCK => {
                let conns = (0..r.count()?).map(|_| Ok((r.named()?, Numbers::from_wire(r.u64()?))));
                Body::Knock(conns.collect::<Result<_, _>>()?)
            }
            MATCH => {
                let count = r.u8()?;
                if usize::from(count) > MAX_MATCHES {
                    return Err(Malformed);
                }
                let conns = (0..count).map(|_| match r.named()? {
                    Named { pair, socket } if socket == Socket::UNKNOWN => Ok((pair, r.stand()?)),
                    _ => Err(Malformed),
                });
                Body::Match(conns.collect::<Result<_, _>>()?)
            }
            SEEK => Body::Seek(r.sought()?),
            HIDE => Body::Hide(r.all_named()?),
            MEASURE => Body::Measure {
                run: r.u64()?,
                named: match r.u8()? {
                    0 => false,
                    NAMED => true,
                    _ => return Err(Malformed),
                },
                paths: r.paths()?,
            },
            ANSWER => {
                let outcomes = (0..r.count()?)
                    .map(|_| Ok((Outcome::from_wire(r.u8()?).ok_or(Malformed)?, r.u64()?)));
                Body::Answer(outcomes.collect::<Result<_, _>>()?)
            }
            _ => return Err(Malformed),
        };
        if !r.0.is_empty() {
            return Err(Malformed);
        }
        Ok(Self { request, body })
    }
}

fn count(len: usize) -> u8 {
    assert!(len <= MAX_ENTRIES, "a message holds {MAX_ENTRIES} entries");
    len as u8
}

fn put_shown(out: &mut Vec<u8>, (pair, stand): &(FlowKey, Stand)) {
    let (pair, socket) = (*pair, Socket::UNKNOWN);
    put_named(out, &Named { pair, socket });
    out.push(stand.timestamps.map_or(0, |_| STAMPED));
    let (tsval, tsecr) = stand.timestamps.unwrap_or_default();
    let numbers = [stand.seq, stand.ack, tsval, tsecr];
    out.extend(numbers.into_iter().flat_map(u32::to_be_bytes));
}

fn put_all(out: &mut Vec<u8>, conns: &[Named]) {
    out.push(count(conns.len()));
    conns.iter().for_each(|named| put_named(out, named));
}

fn put_named(out: &mut Vec<u8>, Named { pair, socket }: &Named) {
    match (pair.src, pair.dst) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            out.push(4);
            out.extend(local.octets());
            out.extend(remote.octets());
        }
        (IpAddr::V6(local), IpAddr::V6(remote)) => {
            out.push(6);
            out.extend(local.octets());
            out.extend(remote.octets());
        }
        _ => panic!("both ends of a connection are of one family"),
    }
    out.extend(pair.sport.to_be_bytes());
    out.extend(pair.dport.to_be_bytes());
    out.extend(socket.0.to_be_bytes());
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.take().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_be_bytes)
    }

    fn count(&mut self) -> Result<u8, Malformed> {
        let count = self.u8()?;
        if usize::from(count) > MAX_ENTRIES {
            return Err(Malformed);
        }
        Ok(count)
    }

    fn all_named(&mut self) -> Result<Vec<Named>, Malformed> {
        (0..self.count()?).map(|_| self.named()).collect()
    }

    fn devices(&mut self) -> Result<Vec<(BumpId, String)>, Malformed> {
        let count = usize::from(self.u8()?);
        if count > MAX_DEVICES {
            return Err(Malformed);
        }
        let device = |_| {
            let bump = BumpId::new(self.u8()?).ok_or(Malformed)?;
            let length = usize::from(self.u8()?);
            let (name, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
            self.0 = rest;
            let name = std::str::from_utf8(name).map_err(|_| Malformed)?;
            let fits = (1..=MAX_NAME).contains(&length);
            fits.then(|| (bump, name.to_owned())).ok_or(Malformed)
        };
        (0..count).map(device).collect()
    }

    fn ports(&mut self) -> Result<Vec<Port>, Malformed> {
        let count = usize::from(self.u8()?);
        if count > MAX_SILENT {
            return Err(Malformed);
        }
        let port = |_| {
            let bump = self.u8()?;
            Ok(Port {
                bump: BumpId::new(bump & !REFUSES).ok_or(Malformed)?,
                port: self.u16()?,
                refuses: bump & REFUSES != 0,
            })
        };
        (0..count).map(port).collect()
    }

    fn paths(&mut self) -> Result<Vec<u8>, Malformed> {
        let count = self.u8()?;
        if usize::from(count) > MAX_MEASURED {
            return Err(Malformed);
        }
        (0..count).map(|_| self.u8()).collect()
    }

    fn sought(&mut self) -> Result<Vec<u16>, Malformed> {
        let count = self.u8()?;
        if usize::from(count) > MAX_SOUGHT {
            return Err(Malformed);
        }
        (0..count).map(|_| self.u16()).collect()
    }

    fn stand(&mut self) -> Result<Stand, Malformed> {
        let flags = self.u8()?;
        let (seq, ack) = (self.u32()?, self.u32()?);
        let stamps = (self.u32()?, self.u32()?);
        let timestamps = match (flags, stamps) {
            (STAMPED, stamps) => Some(stamps),
            (0, (0, 0)) => None,
            _ => return Err(Malformed),
        };
        Ok(Stand {
            seq,
            ack,
            timestamps,
        })
    }

    fn named(&mut self) -> Result<Named, Malformed> {
        let (local, remote): (IpAddr, IpAddr) = match self.u8()? {
            4 => (self.take::<4>()?.into(), self.take::<4>()?.into()),
            6 => (self.take::<16>()?.into(), self.take::<16>()?.into()),
            _ => return Err(Malformed),
        };
        let pair = FlowKey::tcp((local, self.u16()?), (remote, self.u16()?));
        let socket = Socket(self.u32()?);
        Ok(Named { pair, socket })
    }
}

#[cfg(test)]
mod tests;
