//! What happened in runs, so that seeds are known to exercise what they claim.

use std::fmt;

use dibs_core::counters::{Counter, Counters};

macro_rules! seen {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Something that a run may contain. What only counts if it had an effect says so.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Seen {
            $($(#[$doc])* $variant,)*
        }

        impl Seen {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// How it is called in the table.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

seen! {
    /// A connection was opened.
    Opened = "conn: opened",
    /// A connection carried everything to its end.
    Finished = "conn: finished",
    /// An end gave up.
    Aborted = "conn: aborted",
    /// A connection took the ports of one that was over.
    PortsAgain = "conn: same ports again",
    /// A SYN was sent again.
    SynAgain = "conn: SYN sent again",
    /// Both ends closed at once.
    SimultaneousClose = "conn: simultaneous close",
    /// One end went on sending after the other had closed.
    HalfClosed = "conn: half closed",
    /// A receive window closed.
    WindowClosed = "conn: window closed",
    /// It opened again.
    WindowReopened = "conn: window opened again",
    /// A byte was sent into a closed window.
    WindowProbe = "conn: window probe in the bump",
    /// A keepalive of one byte went into the bump.
    Keepalive = "conn: keepalive in the bump",
    /// A segment with urgent data went into the bump.
    Urgent = "conn: urgent segment in the bump",
    /// A receiver stopped reading for a while.
    ReaderStopped = "conn: reader stopped",
    /// A kernel sent bytes again.
    Retransmitted = "conn: retransmission",
    /// A direction left or entered the bump by a mark set by hand.
    MarkedByHand = "switch: mark set by hand",
    /// A daemon had the peer follow a mark that was no choice.
    MarkFollowed = "switch: mark of others followed",
    /// A daemon took a mark for a choice.
    MarkChosen = "switch: mark of others taken for a choice",
    /// A kernel lost its marks.
    MarkLost = "switch: followed mark lost",
    /// A connection followed a packet of its bump.
    Followed = "switch: followed",
    /// A user asked for a connection to enter.
    ChosenIn = "switch: enable",
    /// A user asked for a connection to leave.
    ChosenOut = "switch: disable",
    /// A user asked for a connection to go from one bump to another.
    BumpToBump = "switch: from bump to bump",
    /// Both users asked at once.
    Crossed = "switch: both hosts at once",
    /// The peer's daemon entered, too.
    SwitchedIn = "switch: followed into the bump",
    /// The peer's daemon left, too.
    SwitchedOut = "switch: followed out",
    /// A connection stayed on its bump, of which routers had not heard all.
    RoutersBehind = "switch: routers behind",
    /// An older choice was refused.
    OlderRefused = "switch: older one refused",
    /// A version was refused that nobody can have given.
    VersionRefused = "switch: impossible version refused",
    /// A choice was refused while another one waited.
    BusyRefused = "switch: refused while another waits",
    /// A choice was refused for another reason.
    SwitchRefused = "switch: refused otherwise",
    /// A daemon named its socket: a choice may have been meant for an earlier connection.
    SocketNamed = "switch: told which socket it is",
    /// A refusal came back.
    Refused = "switch: taken back",
    /// A host could not carry out what its peer chose.
    Failed = "switch: could not follow",
    /// A connection that had left came back, by no choice.
    PutBack = "switch: put back, nothing chosen",
    /// A host could not carry out what its user chose.
    FailedHere = "switch: could not begin",
    /// A rule of the peer's stood against a choice that had been made without it.
    OwnRule = "switch: given up for the peer's rule",
    /// Plain was seen to carry a connection, before it went there.
    PlainProved = "switch: plain proved",
    /// Plain was not seen to carry a connection, which stayed on its bump.
    PlainRefused = "switch: plain refused",
    /// A packet in plain that had the numbers of another host's connection matched nothing.
    CopyMatchedNothing = "switch: copy matched nothing",
    /// A firewall on the ordinary route dropped what it did not know.
    FirewallDropped = "plain: dropped by a firewall",
    /// A router answered what it dropped with a reset.
    RouterReset = "plain: reset by a router",
    /// A firewall had changed a connection's numbers, which the data path found.
    Renumbered = "plain: renumbered",
    /// Packet of a daemon in plain that was late, or came twice.
    ShownLate = "plain: shown late or twice",
    /// Somebody sent the like of what a daemon sent in plain.
    ShownForged = "plain: shown by others",
    /// A peer found a connection by other addresses.
    Matched = "names: matched",
    /// A user moved a connection that came from a router's address, and the peer showed that it is its own.
    Sought = "names: sought by a user",
    /// The daemon of a host with rules looked at connections that came from a router's address.
    Strangers = "names: looked for by rules",
    /// The users of a host had other rules from then on.
    RulesChanged = "rules: changed",
    /// Rules began or ended to hold.
    RulesTurned = "rules: turned by the time of day",
    /// A daemon heard by a WANT that the peer's rules need other bumps.
    Wanted = "rules: WANT of other bumps",
    /// A rule moved a connection that was there.
    RuleMoved = "rules: connection moved",
    /// A connection left the bump of a rule that was gone.
    RuleFreed = "rules: connection freed",
    /// A connection began in plain, because the peer was gone for whose session its rule asks.
    RuleWaited = "rules: connection begun in plain",
    /// A peer that could not follow a rule was asked again.
    RuleAgain = "rules: peer asked again",
    /// The peer's daemon followed a rule.
    RuleFollowed = "rules: followed by the peer",
    /// A choice gave way to what a rule requires.
    ChoiceOverruled = "rules: choice overruled",
    /// A choice counted again, once no rule required otherwise.
    ChoiceLeft = "rules: choice counts again",
    /// A choice was made again above the peer's.
    AskedAgain = "switch: asked again",
    /// A later choice overtook one that waited.
    Superseded = "switch: superseded while asking",
    /// The peer did not answer.
    Unanswered = "switch: no answer",
    /// An answer came after all.
    LateAnswer = "switch: late answer",
    /// There was no session to ask by.
    NoSession = "switch: no session",
    /// A choice was told to a new session.
    ToldAgain = "switch: told to a new session",
    /// A drain came to its end.
    Drained = "switch: drained",
    /// A host that was sending left before its peer.
    LeftFirst = "switch: left first",
    /// The peer got ready for that.
    GotReady = "switch: got ready",
    /// A connection was locked.
    Locked = "lock: set",
    /// It was unlocked.
    Unlocked = "lock: taken off",
    /// A plain packet of a locked connection was dropped.
    LockedDropped = "lock: plain packet dropped",
    /// A plain packet of a required connection was dropped.
    RequiredDropped = "require: plain packet dropped",
    /// A connection was brought to a bump by a rule of its own.
    Pinned = "a rule of its own: brought to the bump",
    /// A plain packet of a connection that has a rule of its own was dropped.
    PinnedDropped = "a rule of its own: plain packet dropped",
    /// A packet of a locked connection came by another bump and was dropped.
    LockedElsewhere = "lock: packet of another bump dropped",
    /// The same of a required connection.
    RequiredElsewhere = "require: packet of another bump dropped",
    /// A required connection stayed where it was.
    RequiredKept = "require: disable refused",
    /// A required connection carried everything.
    RequiredFinished = "require: conn finished",
    /// A daemon died while it waited for an answer.
    CrashAsking = "crash: while asking",
    /// A daemon died while a connection left.
    CrashLeaving = "crash: while draining",
    /// A daemon died.
    Crash = "crash",
    /// Both were dead at once.
    CrashBoth = "crash: both at once",
    /// A host slept.
    Suspended = "host: slept",
    /// An interface went down.
    InterfaceDown = "path: interface down",
    /// A path was out without a word.
    Outage = "path: outage",
    /// All paths were cut for a while.
    Cut = "path: all cut",
    /// A path's MTU changed.
    Mtu = "path: MTU changed",
    /// A path took something larger than its network does.
    TooBig = "path: datagram too big",
    /// A link lost a datagram.
    LinkLost = "link: lost",
    /// A router marked a datagram for congestion.
    LinkMarked = "link: marked",
    /// A link delivered out of order.
    LinkLate = "link: reordered",
    /// A link doubled a datagram.
    LinkDoubled = "link: doubled",
    /// A link flipped a bit.
    LinkCorrupted = "link: bit flipped",
    /// The adversary dropped a datagram.
    AdversaryDrop = "adversary: dropped",
    /// He held it back.
    AdversaryDelay = "adversary: held back",
    /// He doubled it.
    AdversaryDouble = "adversary: doubled",
    /// He spoilt it.
    AdversarySpoil = "adversary: spoilt",
    /// He sent it from elsewhere.
    AdversarySource = "adversary: other source",
    /// He sent it by another path.
    AdversaryCross = "adversary: other path",
    /// He sent it back.
    AdversaryReflect = "adversary: sent back",
    /// He sent an old one again.
    AdversaryReplay = "adversary: replayed",
    /// He made one up with a valid clear header.
    AdversaryForge = "adversary: forged",
    /// A daemon sent something to an address that only he used.
    Lured = "adversary: daemon answered elsewhere",
    /// A forged plain packet of a locked or required connection.
    PlainForged = "host: plain packet forged",
    /// A plain packet came again.
    PlainReplayed = "host: plain packet replayed",
    /// A packet that does not belong there fell into a TUN.
    TunForeign = "host: foreign packet in the TUN",
    /// An opaque packet went in.
    Opaque = "opaque: sent",
    /// It came out.
    OpaqueArrived = "opaque: arrived",
    /// A share was sent.
    Share = "share: sent",
    /// It was sent again, by the same path.
    ShareAgain = "share: sent again",
    /// It was cut for a path that had become too small.
    ShareCut = "share: cut to fragments",
    /// There were too few paths, and it waited.
    ShareWaited = "share: waited for a path",
    /// A chunk was encrypted whole.
    Sealed = "seal: sent",
    /// The same by a trusted path.
    SealedTrusted = "seal: sent by a trusted path",
    /// A chunk of a chain was sent.
    Chained = "scramble: sent",
    /// A message of the daemons arrived.
    ControlArrived = "control: arrived",
    /// A segment went into the bump whose data is shared out by `balanced`.
    Balanced = "paths: scheduler balanced",
    /// The same by `lowest-rtt`.
    LowestRtt = "paths: scheduler lowest-rtt",
    /// The same by `round-robin`.
    RoundRobin = "paths: scheduler round-robin",
    /// The same by `redundant`.
    Redundant = "paths: scheduler redundant",
    /// The same by `blest`.
    Blest = "paths: scheduler blest",
    /// Its connection has a scheduler of its own.
    FlowScheduler = "paths: scheduler of the connection",
    /// New data went by the preferred path.
    Preferred = "paths: preferred one taken",
    /// Data went by a secondary path.
    SecondaryUsed = "paths: secondary taken",
    /// Data went by a backup.
    BackupUsed = "paths: backup taken",
    /// Data went by another path than the backup.
    BackupSpared = "paths: backup spared",
    /// Data went by another path than one that is never used.
    NeverUsed = "paths: never used",
    /// The same of one whose volume is used up.
    VolumeSpent = "paths: volume used up",
    /// Data went by a path whose rate is limited.
    RateLimited = "paths: rate limited",
}

/// How often each thing happened; and the daemons' counters, summed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    seen: [u64; Seen::ALL.len()],
    counters: [u64; Counter::ALL.len()],
}

impl Default for Coverage {
    fn default() -> Self {
        Self {
            seen: [0; Seen::ALL.len()],
            counters: [0; Counter::ALL.len()],
        }
    }
}

impl Coverage {
    /// Notes one.
    pub fn note(&mut self, what: Seen) {
        self.seen[what as usize] += 1;
    }

    /// All of these happened.
    pub fn note_all(&mut self, what: impl IntoIterator<Item = Seen>) {
        what.into_iter().for_each(|what| self.note(what));
    }

    /// How often it was.
    pub fn get(&self, what: Seen) -> u64 {
        self.seen[what as usize]
    }

    /// How high a daemon's counter stands, over all daemons of the run.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }

    /// Adds what a daemon has counted.
    pub fn add_counters(&mut self, counters: &Counters) {
        for (sum, &counter) in self.counters.iter_mut().zip(Counter::ALL) {
            *sum += counters.get(counter);
        }
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        for (sum, n) in self.all_mut().zip(other.all()) {
            *sum += n;
        }
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        self.seen.iter().chain(&self.counters).copied()
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        self.seen.iter_mut().chain(&mut self.counters)
    }
}

/// The coverage of many runs.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    runs: u64,
    times: Coverage,
    /// In how many runs it happened at all.
    within: Coverage,
}

impl Histogram {
    /// Takes in one run.
    pub fn add(&mut self, run: &Coverage) {
        self.runs += 1;
        self.times.add(run);
        for (sum, n) in self.within.all_mut().zip(run.all()) {
            *sum += u64::from(n > 0);
        }
    }

    /// Names of what never happened.
    pub fn missing(&self) -> Vec<&'static str> {
        let missing = |what: &&Seen| self.times.get(**what) == 0;
        Seen::ALL.iter().filter(missing).map(|w| w.name()).collect()
    }
}

impl fmt::Display for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Seen::ALL.iter().map(|s| s.name().to_owned());
        let counters = Counter::ALL
            .iter()
            .map(|c| format!("counter: {}", c.name()));
        writeln!(f, "{:<44} {:>12} {:>9}", "what", "times", "of seeds")?;
        let rows = self.times.all().zip(self.within.all());
        for (name, (times, within)) in names.chain(counters).zip(rows) {
            let share = 100.0 * within as f64 / self.runs.max(1) as f64;
            writeln!(f, "{name:<44} {times:>12} {share:>7.2} %")?;
        }
        Ok(())
    }
}
