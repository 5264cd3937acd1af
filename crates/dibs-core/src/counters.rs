//! Named counters: every drop has one, and the user can see them all.

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Counters of a node.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter {
            $($(#[$doc])* $variant,)*
        }

        impl Counter {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name that the user sees.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

counters! {
    /// A packet from the TUN that is not IP, or whose lengths contradict each other.
    TunMalformed = "tun_malformed",
    /// A packet from the TUN for nobody's prefix.
    TunNoPeer = "tun_no_peer",
    /// A packet from the TUN that its peer would refuse: neither TCP nor an ICMP error about TCP between the two,
    /// or sent on a detour.
    TunRefused = "tun_refused",
    /// A packet that is carried whole, for a peer without a session.
    TunNoSession = "tun_no_session",
    /// A packet that found its flow's queue full.
    QueueFull = "queue_full",
    /// Segments dropped that a kernel sent although its window was closed, because its connection leaves the bump.
    SilenceBroken = "silence_broken",
    /// Segments that CoDel dropped.
    CodelDropped = "codel_dropped",
    /// Segments that CoDel dropped, TCP did not send again, and were sent after all.
    CodelReturned = "codel_returned",
    /// Packets that CoDel marked.
    CodelMarked = "codel_marked",
    /// An opaque packet that found its queue full.
    OpaqueQueueFull = "opaque_queue_full",
    /// A handshake message that came in by an untrusted path, where `handshake = "trusted"`.
    HandshakeUntrusted = "handshake_untrusted_path",
    /// A handshake by an untrusted path with neither a secret of an earlier one nor a preshared key in it, where
    /// `handshake = "chained"`.
    HandshakeUnsecured = "handshake_unsecured",
    /// A handshake message came by a path that carries nothing.
    HandshakeUnused = "handshake_unused_path",
    /// Not a handshake message, or of another version or suite.
    HandshakeMalformed = "handshake_malformed",
    /// A handshake message whose sender does not know our public key.
    HandshakeMac1 = "handshake_wrong_mac1",
    /// A call of somebody whose `integrity` is not ours.
    HandshakeIntegrity = "handshake_integrity_mismatch",
    /// A call whose address is to be proved first.
    HandshakeCookie = "handshake_cookie_demanded",
    /// A handshake message that does not decrypt.
    HandshakeUnauthentic = "handshake_unauthentic",
    /// A call of somebody who is no peer.
    HandshakeUnknownPeer = "handshake_unknown_peer",
    /// A call not newer than the latest of its peer.
    HandshakeReplayed = "handshake_replayed",
    /// A call given up for our own.
    HandshakeCrossed = "handshake_crossed",
    /// An answer to nothing that we asked.
    HandshakeUnknownIndex = "handshake_unknown_index",
    /// More handshake messages than are read, or sent.
    HandshakeOverload = "handshake_overload",
    /// A datagram too short or of no known type.
    DatagramMalformed = "datagram_malformed",
    /// A datagram for no session of ours.
    DatagramUnknownIndex = "datagram_unknown_index",
    /// A datagram of an expired session.
    DatagramExpired = "datagram_expired",
    /// A datagram seen before.
    DatagramReplayed = "datagram_replayed",
    /// A datagram whose tag does not match.
    DatagramUnauthentic = "datagram_unauthentic",
    /// A bare datagram where none was agreed to, or with what only authenticated ones may carry.
    BareRefused = "bare_refused",
    /// A share by other numbers than this node splits by.
    ShareMismatch = "share_mismatch",
    /// A share of a set that had enough.
    ShareLate = "share_late",
    /// Sets of shares that were given up, for they were never completed.
    SetsExpired = "sets_expired",
    /// A flow or packet of a bump that this node does not carry.
    BumpUnknown = "bump_unknown",
    /// Bytes that came with less protection than their bump gives.
    CoverMissing = "cover_missing",
    /// A datagram on a path that it does not belong to.
    WrongPath = "wrong_path",
    /// A path that the peer asked for in vain: crossed by our own question, beyond the bound, with
    /// a number that is ours to give, or on a trusted path from elsewhere than its endpoint.
    PathRefused = "path_refused",
    /// A trusted path that the peer asked for at an address that is not, or not only, of the path that
    /// the question came by: somebody brought it there, or addresses are translated.
    PathMisdirected = "path_misdirected",
    /// Addresses asked whether the peer is there, since its datagrams began to come from them.
    EndpointChallenged = "endpoint_challenged",
    /// Addresses that answered, and are where the peer is now.
    EndpointMoved = "endpoint_moved",
    /// Data on a path that has not been validated.
    PathNotValidated = "path_not_validated",
    /// A frame that does not parse.
    FrameMalformed = "frame_malformed",
    /// A frame that contradicts what the same peer said before.
    PeerContradiction = "peer_contradiction",
    /// An acknowledgement that cannot be.
    AckRefused = "ack_refused",
    /// An inner packet whose source is not the peer's or whose destination is not ours.
    InnerAddress = "inner_address_refused",
    /// A connection of a peer that is translated here, for which no port is left.
    PortsTaken = "ports_taken",
    /// An inner packet that is neither TCP nor an ICMP error about TCP.
    InnerProtocol = "inner_protocol_refused",
    /// The beginning of a connection to where the peer may open none.
    ConnectionRefused = "connection_refused",
    /// Connections that a peer tries to open here, and that the local kernel does not answer: a firewall drops them.
    CallUnanswered = "connection_unanswered",
    /// Calls that get no answer at ports beyond those that are named.
    SilentPortUnnamed = "silent_port_unnamed",
    /// A chunk of a flow that was never opened.
    FlowUnknown = "flow_unknown",
    /// A connection forgotten since there were too many; it opens again when it speaks.
    FlowEvicted = "flow_evicted",
    /// Word of an unknown flow or a broken epoch that found too much before it.
    NoticeDropped = "notice_dropped",
    /// An answer or question of a path that found too many before it.
    PathFrameDropped = "path_frame_dropped",
    /// A message of the peer's daemon for which there was no room; it is to come again.
    ControlRefused = "messages_refused",
    /// A chunk of an older incarnation.
    FlowOld = "flow_old_incarnation",
    /// A chunk that came twice.
    ChunkDuplicate = "chunk_duplicate",
    /// A chunk for which the store had no room.
    StoreFull = "store_full",
    /// A chunk of an epoch that had ended, or that ended before the chunk could be restored.
    EpochEnded = "epoch_ended",
    /// A chunk that did not restore to its CRC.
    CrcMismatch = "crc_mismatch",
    /// Fragments given up before they were whole.
    FragmentsExpired = "fragments_expired",
    /// Chunks sent again.
    ChunkResent = "chunk_resent",
    /// Chunks that another path carried as well (`redundant`).
    ChunkCopied = "chunk_copied",
    /// Chunks given up and left to TCP.
    ChunkGivenUp = "chunk_given_up",
    /// Datagrams not sent because the session's keys are used up.
    KeysExhausted = "keys_exhausted",
    /// Handshake sessions established.
    Sessions = "sessions_established",
    /// Restarts of a peer noticed.
    PeerRestarts = "peer_restarts",
    /// Packets injected into a TUN.
    Injected = "injected",
}

/// The counts.
#[derive(Clone, Debug)]
pub struct Counters([u64; Counter::ALL.len()]);

impl Default for Counters {
    fn default() -> Self {
        Self([0; Counter::ALL.len()])
    }
}

impl Counters {
    /// Counts one.
    pub fn count(&mut self, counter: Counter) {
        self.add(counter, 1);
    }

    /// Counts so many.
    pub fn add(&mut self, counter: Counter, count: u64) {
        self.0[counter as usize] += count;
    }

    /// How many there were.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// All with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Counter::ALL.iter().map(|&c| (c.name(), self.get(c)))
    }
}
