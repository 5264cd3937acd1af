//! The paths to a peer: joining, validation, roaming.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};

use crate::chunk::Delayed;
use crate::counters::Counter;
use crate::node::notice::Event;
use crate::node::shared::Shared;
use crate::path::{Path, PathConfig, PathState};
use crate::path_index::PathIndex;
use crate::session::{MAX_DATAGRAM, OVERHEAD, PathId, PeerId, Random};
use crate::time::Time;

/// Wait for the answer to the first join or accept; doubled each time.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(1);
/// What is believed of a first round trip, which measures with all repetitions of the question.
const LONGEST_TRIP: Duration = Duration::from_secs(1);
/// Times that an accept is repeated before the peer has to ask again.
const ACCEPTS: u32 = 6;
/// Times that a join is repeated under one path id.
const JOINS: u32 = 16;

/// Among bare datagrams one of so many is authenticated, and shows how far the numbers have come.
pub(in crate::node) const PROOF_SPACING: u64 = 1 << 10;
/// How far the number of a bare datagram may lie ahead of all that were authenticated.
const BARE_AHEAD: u64 = 4 * PROOF_SPACING;

/// To a place that has not proved to be the peer's goes at most so many times what came from there.
const AMPLIFICATION: u64 = 3;
/// Bytes of frames that wait for a datagram of their path, at most.
const MAX_FRAMES: usize = 512;
/// A datagram with a challenge.
const CHALLENGE_LEN: u64 = OVERHEAD as u64 + 9;

/// How far a path has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// We asked; the peer has not answered.
    Joining { nonce: [u8; 8], retry: Retry },
    /// The peer asked, and has not answered our challenge.
    Accepting {
        nonce: [u8; 8],
        challenge: [u8; 8],
        retry: Retry,
    },
    /// Both ends have proved themselves.
    Open,
}

/// A repeated question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    at: Time,
    tries: u32,
    /// When the question was first asked; an answer may be to any of its repetitions.
    first: Option<Time>,
}

impl Retry {
    fn new(now: Time) -> Self {
        Self {
            at: now,
            tries: 0,
            first: None,
        }
    }

    /// Repeats the same question from now on, as often as a new one.
    fn begin_again(&mut self, now: Time) {
        self.at = now;
        self.tries = 0;
    }

    /// The longest that the answer can have taken. Too short a time would take each of the
    /// datagrams to come for lost; one as long as the peer was away would never miss one.
    fn round_trip(&self, now: Time) -> Duration {
        let longest = self.first.map_or(Duration::ZERO, |first| now.since(first));
        longest.min(LONGEST_TRIP)
    }

    fn next(&mut self, now: Time) {
        let wait = FIRST_RETRY * (1 << self.tries.min(8));
        self.at = now + wait.min(MAX_RETRY);
        self.tries += 1;
        self.first.get_or_insert(now);
    }
}

/// An address that a path's datagrams began to come from.
#[derive(Clone, Copy, Debug)]
struct Roaming {
    to: SocketAddr,
    challenge: [u8; 8],
    retry: Retry,
    /// Bytes that may be sent there.
    credit: u64,
}

/// A path to the peer.
pub(crate) struct Link {
    /// Its number on the wire.
    pub(crate) id: PathId,
    /// The local path.
    pub(crate) local: PathIndex,
    /// The peer's end.
    pub(crate) remote: SocketAddr,
    /// The lower of both ends' labels.
    pub(crate) trusted: bool,
    stage: Stage,
    pub(crate) path: Path,
    /// Bytes received by it.
    pub(crate) bytes_received: u64,
    /// Frames to be sent by it at once, whatever its state.
    pub(crate) frames: Vec<u8>,
    /// A datagram that asks for an acknowledgement is due.
    probe: bool,
    /// Shares that it lost: no other path may carry them.
    pub(crate) shares: VecDeque<Delayed>,
    /// The higher, the later it was chosen for something.
    pub(super) turn: u64,
    /// It had room, but what waited would be there earlier by others.
    pub(super) passed_over: bool,
    /// Chunks that another path was given and this one carries, too.
    pub(crate) copies: VecDeque<Delayed>,
    roaming: Option<Roaming>,
    /// The highest number of an authentic datagram.
    highest: u64,
    /// Bytes that may be sent before the path is open, if the peer asked for it.
    credit: u64,
    /// The challenge that we answered.
    answered: Option<[u8; 8]>,
    shown: &'static str,
}

/// The longest datagram (UDP payload) to `remote` through an interface that takes packets of `mtu` bytes.
pub(in crate::node) fn longest(mtu: u16, remote: SocketAddr) -> u16 {
    let headers = if remote.is_ipv4() { 28 } else { 48 };
    mtu.saturating_sub(headers).min(MAX_DATAGRAM as u16)
}

impl Link {
    /// A path that we ask the peer to open.
    pub(crate) fn join(
        now: Time,
        shared: &mut Shared,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
    ) -> Self {
        let mut nonce = [0; 8];
        shared.rng.fill(&mut nonce);
        Self::new(
            now,
            shared,
            id,
            local,
            remote,
            Stage::Joining {
                nonce,
                retry: Retry::new(now),
            },
        )
    }

    /// A path that the peer asks to open, by a datagram of `len` bytes.
    #[expect(clippy::too_many_arguments, reason = "all of the question")]
    pub(crate) fn accept(
        now: Time,
        shared: &mut Shared,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
        len: u64,
        nonce: [u8; 8],
        trusted: bool,
    ) -> Self {
        let mut challenge = [0; 8];
        shared.rng.fill(&mut challenge);
        let stage = Stage::Accepting {
            nonce,
            challenge,
            retry: Retry::new(now),
        };
        let mut link = Self::new(now, shared, id, local, remote, stage);
        link.trusted &= trusted;
        link.credit = AMPLIFICATION * len;
        link
    }

    fn new(
        now: Time,
        shared: &Shared,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
        stage: Stage,
    ) -> Self {
        let longest = longest(shared.local[local].mtu, remote);
        let mut path = Path::new(now, PathConfig { longest });
        path.set_rate_limit(shared.local[local].usage.rate);
        path.set_probes(shared.probes_of(local));
        Self {
            id,
            local,
            remote,
            trusted: shared.local[local].trusted,
            stage,
            path,
            bytes_received: 0,
            frames: Vec::new(),
            probe: false,
            shares: VecDeque::new(),
            turn: 0,
            passed_over: false,
            copies: VecDeque::new(),
            roaming: None,
            highest: 0,
            credit: 0,
            answered: None,
            shown: "",
        }
    }

    /// Whether it may carry what the peers exchange.
    pub(crate) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Lets its datagrams be numbered from `seq` on.
    pub(crate) fn starting_at(self, seq: u64) -> Self {
        Self {
            path: self.path.starting_at(seq),
            ..self
        }
    }

    /// Whether the peer asked for it and has not proved itself.
    pub(crate) const fn is_accepting(&self) -> bool {
        matches!(self.stage, Stage::Accepting { .. })
    }

    /// Whether we asked for it and were not answered.
    pub(crate) const fn is_joining(&self) -> bool {
        matches!(self.stage, Stage::Joining { .. })
    }

    /// True if we asked for it so many times and were not answered.
    pub(crate) fn has_asked(&self, times: u32) -> bool {
        matches!(self.stage, Stage::Joining { retry, .. } if retry.tries >= times)
    }

    /// Whether another path over the same interface is worth asking for: the peer has stopped
    /// asking for this one, or does not answer by it, perhaps for it knows nothing of it, or knows
    /// another by its id.
    pub(crate) fn is_lost(&self) -> bool {
        match self.stage {
            Stage::Joining { retry, .. } => retry.tries >= JOINS,
            Stage::Accepting { retry, .. } => retry.tries >= ACCEPTS,
            Stage::Open => self.is_down(),
        }
    }

    /// Whether it was open, and the peer has been silent on it for seconds.
    pub(crate) fn is_down(&self) -> bool {
        self.is_open() && self.path.state() == PathState::Down
    }

    /// Whether new data may go by it.
    pub(crate) fn is_active(&self, shared: &Shared) -> bool {
        self.is_open()
            && shared.local[self.local].is_usable()
            && self.path.state() == PathState::Active
    }

    /// What the user is shown.
    pub(crate) fn state_name(&self, shared: &Shared) -> &'static str {
        if !self.is_open() {
            return "joining";
        }
        if !shared.local[self.local].is_usable() {
            return "down";
        }
        match self.path.state() {
            PathState::Active => "active",
            PathState::Suspect => "suspect",
            PathState::Down | PathState::Unvalidated => "down",
        }
    }

    /// Tells the owner if the state is not what it was told last.
    pub(crate) fn note_state(&mut self, shared: &mut Shared, peer: PeerId) {
        let state = self.state_name(shared);
        if state != self.shown {
            self.shown = state;
            shared.events.push(Event::Path {
                peer: peer.index(),
                path: self.local.get(),
                state,
            });
        }
    }

    /// Takes so many bytes of what may be sent by it now: without limit but for a place that is not
    /// proved. False if that is not enough.
    pub(crate) fn spend(&mut self, len: usize) -> bool {
        if !self.is_accepting() {
            return true;
        }
        let left = self.credit.checked_sub(len as u64);
        self.credit = left.unwrap_or(self.credit);
        left.is_some()
    }

    /// The interface is back: asks at once whatever is to be asked.
    pub(crate) fn on_up(&mut self, now: Time) {
        self.probe = true;
        match &mut self.stage {
            Stage::Joining { retry, .. } | Stage::Accepting { retry, .. } => {
                retry.at = retry.at.min(now);
            }
            Stage::Open => {}
        }
    }

    /// The session is new: asks by it at once, if there is anything to be asked.
    pub(crate) fn ask_again(&mut self, now: Time) {
        if let Stage::Joining { retry, .. } = &mut self.stage {
            retry.begin_again(now);
        }
    }

    /// The peer is to acknowledge something by it.
    pub(super) fn elicit_ack(&mut self) {
        self.probe = true;
    }

    /// Whether a datagram that asks for an acknowledgement is due; it goes now.
    pub(crate) fn take_probe(&mut self) -> bool {
        self.is_open() && std::mem::take(&mut self.probe)
    }

    /// Whether anything is due by it beside an acknowledgement.
    pub(crate) fn has_frames(&self) -> bool {
        !self.frames.is_empty() || (self.is_open() && self.probe)
    }

    /// Queues a frame that goes by this path.
    pub(crate) fn push_frame(&mut self, shared: &mut Shared, frame: &Frame<'_>) {
        let mut bytes = [0; 64];
        let mut w = Writer::new(&mut bytes);
        frame::encode(frame, &mut w);
        let len = w.len();
        // What a peer can make us answer is bounded.
        if self.frames.len() + len > MAX_FRAMES {
            return shared.count(Counter::PathFrameDropped);
        }
        self.frames.extend_from_slice(&bytes[..len]);
    }

    /// When [`on_timer`](Self::on_timer) is due.
    pub(crate) fn timer(&self) -> Option<Time> {
        let stage = match self.stage {
            Stage::Joining { retry, .. } => Some(retry.at),
            Stage::Accepting { retry, .. } if retry.tries < ACCEPTS => Some(retry.at),
            Stage::Accepting { .. } | Stage::Open => None,
        };
        let roaming = self.roaming.as_ref().map(|r| r.retry.at);
        [stage, roaming].into_iter().flatten().min()
    }

    /// Repeats what has not been answered.
    pub(crate) fn on_timer(&mut self, now: Time, shared: &mut Shared) {
        let label = shared.local[self.local].trusted;
        match &mut self.stage {
            Stage::Joining { nonce, retry } if retry.at <= now => {
                retry.next(now);
                let frame = Frame::PathJoin {
                    nonce: *nonce,
                    trusted: label,
                    to: self.remote.ip(),
                };
                self.push_frame(shared, &frame);
            }
            Stage::Accepting {
                nonce,
                challenge,
                retry,
            } if retry.at <= now && retry.tries < ACCEPTS => {
                retry.next(now);
                let frame = Frame::PathAccept {
                    nonce: *nonce,
                    challenge: *challenge,
                    trusted: label,
                };
                // What could not be sent for want of credit is of no use any more.
                self.frames.clear();
                self.push_frame(shared, &frame);
            }
            _ => {}
        }
        // At most three challenges go to a place that is not proved; `poll_challenge` sends them.
        if self
            .roaming
            .as_ref()
            .is_some_and(|r| r.retry.at <= now && r.retry.tries >= 3)
        {
            self.roaming = None;
        }
    }

    /// The peer asks (again) to open this path.
    pub(crate) fn on_join(
        &mut self,
        now: Time,
        shared: &mut Shared,
        nonce: [u8; 8],
        trusted: bool,
    ) {
        match &mut self.stage {
            Stage::Accepting {
                nonce: known,
                retry,
                ..
            } => {
                *known = nonce;
                retry.begin_again(now);
                self.trusted = shared.local[self.local].trusted && trusted;
            }
            // The peer missed our confirmation of its own challenge, or the other way round: it
            // proved itself before; the label can only fall.
            Stage::Open => {
                self.trusted &= trusted;
                let label = shared.local[self.local].trusted;
                self.push_frame(
                    shared,
                    &Frame::PathAccept {
                        nonce,
                        challenge: [0; 8],
                        trusted: label,
                    },
                );
            }
            Stage::Joining { .. } => {}
        }
    }

    /// A datagram of it was taken, which a router may have marked for congestion.
    pub(crate) fn on_taken(&mut self, now: Time, seq: u64, eliciting: bool, marked: bool) {
        self.path.on_received(now, seq, eliciting);
        if marked {
            self.path.on_marked();
        }
        // It is there again: an answer to a question of ours makes it ours to use.
        self.probe |= eliciting && self.path.state() != PathState::Active;
    }

    /// Data came although the peer has not answered our challenge: it did, and the answer was lost.
    pub(crate) fn on_early_data(&mut self) {
        if let Stage::Accepting { retry, .. } = &mut self.stage {
            retry.tries = retry.tries.min(ACCEPTS - 1);
        }
    }

    /// The peer accepts; false if that answers nothing of ours.
    pub(crate) fn on_accept(
        &mut self,
        now: Time,
        shared: &mut Shared,
        nonce: [u8; 8],
        challenge: [u8; 8],
        trusted: bool,
    ) -> bool {
        match self.stage {
            Stage::Joining { nonce: ours, retry } if ours == nonce => {
                self.trusted &= trusted;
                self.stage = Stage::Open;
                self.path.on_validated(now, retry.round_trip(now));
                self.answered = Some(challenge);
                self.push_frame(shared, &Frame::PathConfirm { challenge });
                true
            }
            // Our confirmation was lost; or somebody had our question answered at another
            // interface, and brought us that answer.
            Stage::Open => {
                if self.answered == Some(challenge) {
                    self.push_frame(shared, &Frame::PathConfirm { challenge });
                }
                true
            }
            _ => false,
        }
    }

    /// The peer answers our challenge; false if it does not, or one that was not sent to where it is
    /// now.
    pub(crate) fn on_confirm(&mut self, now: Time, challenge: [u8; 8]) -> bool {
        match self.stage {
            Stage::Accepting {
                challenge: ours,
                retry,
                ..
            } if ours == challenge => {
                self.stage = Stage::Open;
                self.path.on_validated(now, retry.round_trip(now));
                true
            }
            Stage::Open => true,
            _ => false,
        }
    }

    /// An authentic datagram came from `from`. If that is not where the peer was, and nothing newer
    /// came from there, the new place is challenged; the old one is kept meanwhile (docs/protocol.md, 7).
    pub(crate) fn on_source(
        &mut self,
        now: Time,
        shared: &mut Shared,
        seq: u64,
        from: SocketAddr,
        len: u64,
    ) {
        let newest = seq >= self.highest;
        self.highest = self.highest.max(seq);
        if newest && from != self.remote {
            self.ask_anew(now, shared, from);
        }
        if self.is_accepting() && from == self.remote {
            self.credit += AMPLIFICATION * len;
        }
        if from == self.remote || !newest || !self.is_open() {
            return;
        }
        // Trusted paths do not roam.
        if self.trusted {
            return;
        }
        if let Some(roaming) = self.roaming.as_mut().filter(|r| r.to == from) {
            roaming.credit += AMPLIFICATION * len;
            return;
        }
        shared.count(Counter::EndpointChallenged);
        let mut challenge = [0; 8];
        shared.rng.fill(&mut challenge);
        self.roaming = Some(Roaming {
            to: from,
            challenge,
            retry: Retry::new(now),
            credit: AMPLIFICATION * len,
        });
    }

    /// Where the peer asked from at first, it has not proved to be: what it is to prove itself with
    /// goes to `from`, too, and only an answer from there counts. Otherwise whoever sends its answer
    /// from elsewhere would open the path to there.
    fn ask_anew(&mut self, now: Time, shared: &mut Shared, from: SocketAddr) {
        if let Stage::Accepting {
            challenge, retry, ..
        } = &mut self.stage
        {
            shared.rng.fill(challenge);
            *retry = Retry::new(now);
            self.frames.clear();
            self.remote = from;
            self.credit = 0;
        }
    }

    /// Whether a bare datagram may be one of the peer's: it comes from where the peer is, and its
    /// number is one that may have been sent. A forged one must not acknowledge a far future.
    pub(crate) fn expects_bare(&self, seq: u64, from: SocketAddr) -> bool {
        from == self.remote && seq <= self.highest.saturating_add(BARE_AHEAD)
    }

    /// A challenge to send to a place that is not proved yet.
    pub(crate) fn poll_challenge(&mut self, now: Time) -> Option<(SocketAddr, [u8; 8])> {
        let roaming = self.roaming.as_mut()?;
        if roaming.retry.at > now || roaming.retry.tries >= 3 {
            return None;
        }
        roaming.retry.next(now);
        roaming.credit = roaming.credit.checked_sub(CHALLENGE_LEN)?;
        Some((roaming.to, roaming.challenge))
    }

    /// The new place answered: it is where the peer is now.
    pub(crate) fn on_response(&mut self, from: SocketAddr, challenge: [u8; 8]) -> bool {
        match self.roaming {
            Some(roaming) if roaming.challenge == challenge && roaming.to == from => {
                self.remote = from;
                self.roaming = None;
                true
            }
            _ => false,
        }
    }
}
