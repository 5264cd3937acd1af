//! Parts of a node that all its peers use: this host's setup, the journal for its owner, dice, and room to work in.

use std::net::IpAddr;
use std::sync::Arc;

use dibs_settings::{Hint, Scheduler};
use dibs_wire::FlowKey;
use ipnet::IpNet;
use smallvec::SmallVec;
use zeroize::Zeroizing;

use super::config::{LocalPath, LocalPaths};
use super::flow_scheduler::FlowScheduler;
use super::notice::Events;
use crate::buffer::{Buffer, Pool};
use crate::bump::{Bump, Bumps, Pads, Split};
use crate::counters::{Counter, Counters};
use crate::flow::inject::Injector;
use crate::path_index::PathIndex;
use crate::session::{Random as _, SeededRandom};

/// Whose packets may come out of the TUN here.
pub(super) struct Own {
    /// Addresses of this host.
    pub(super) addresses: Vec<IpAddr>,
    /// Addresses of them that the paths' interfaces have.
    pub(super) reachable: Vec<IpAddr>,
    /// Networks that this host forwards for.
    pub(super) gateway: Vec<IpNet>,
    /// Networks that peers reach by this host, in its name.
    pub(super) exit: Vec<IpNet>,
    /// Networks in those that they do not reach all the same.
    pub(super) closed: Vec<IpNet>,
}

impl Own {
    fn is_behind(&self, addr: IpAddr) -> bool {
        self.gateway.iter().any(|net| net.contains(&addr))
    }
}

/// How paths are to be used, beside what each [`LocalPath`] says of itself.
pub(super) struct Policy {
    /// Part of each chained flow that only trusted paths carry.
    pub(super) trusted_share: f64,
    /// With no trusted path alive, chained flows wait.
    pub(super) hold_without_trusted: bool,
    pub(super) scheduler: Scheduler,
    /// For some connections another one: the first that selects them.
    pub(super) flow_schedulers: Vec<FlowScheduler>,
    pub(super) hint: Option<Hint>,
}

impl Policy {
    /// The scheduler that the user wants for a connection of these ends, as the local host sends; none: the general one.
    pub(super) fn scheduler_of(&self, tuple: &FlowKey) -> Option<Scheduler> {
        let mut all = self.flow_schedulers.iter();
        let first = all.find(|one| one.selects(tuple))?;
        Some(first.scheduler)
    }
}

/// Buffers that are filled and emptied again within a call, kept for their room.
#[derive(Default)]
pub(super) struct Scratch {
    /// Datagrams of a send that nobody keeps.
    pub(super) datagrams: Vec<u8>,
    /// One of several that nobody keeps, until the next one.
    once: Option<Buffer>,
    /// Random bytes of a split, and its shares.
    random: Zeroizing<Vec<u8>>,
    shares: Zeroizing<Vec<u8>>,
    /// Whole that was put together of shares.
    pub(super) joined: Vec<u8>,
    /// Tokens that a path gives back: those acknowledged, and those lost.
    pub(super) acked: Vec<u64>,
    pub(super) lost: Vec<u64>,
}

impl Scratch {
    /// Keeps the first bytes of a buffer until the next one.
    pub(super) fn keep_once(&mut self, pool: &mut Pool, buffer: Buffer, len: usize) -> &[u8] {
        if let Some(before) = self.once.replace(buffer) {
            pool.give(before);
        }
        &self.once.as_deref().expect("it was just put there")[..len]
    }

    /// Splits what stands in the scratch datagram; how long each share is. See [`share`](Self::share).
    pub(super) fn split(&mut self, pads: &mut Pads, split: &dyn Split) -> usize {
        let Self {
            datagrams,
            random,
            shares,
            ..
        } = self;
        let len = split.share_len(datagrams.len());
        random.resize(split.randomness(datagrams.len()), 0);
        pads.fill(random);
        shares.resize(usize::from(split.shares()) * len, 0);
        let mut rooms: SmallVec<[&mut [u8]; 4]> = shares.chunks_exact_mut(len).collect();
        split.split(datagrams, random, &mut rooms);
        len
    }

    /// A share of the whole that was split last, each of `len` bytes.
    pub(super) fn share(&self, index: usize, len: usize) -> &[u8] {
        &self.shares[index * len..][..len]
    }
}

/// Setup of this host: what its user wants, and what a run of the daemon is told or draws at its start.
pub(crate) struct Setup {
    pub(crate) local: LocalPaths,
    pub(crate) bumps: Arc<Bumps>,
    pub(super) own: Own,
    pub(super) policy: Policy,
    /// Number of this run of the daemon.
    pub(crate) instance: u64,
    /// Seeds of the hash tables.
    pub(crate) hash_keys: (u64, u64),
}

impl Setup {
    /// How many probes of a local path that stops answering come at one interval, if the user has said.
    pub(crate) fn probes_of(&self, local: PathIndex) -> Option<u32> {
        let hint = self.policy.hint.filter(|hint| local.is_preferred(hint))?;
        Some(hint.weight)
    }

    /// True if an address is this host's, or of a network that it forwards for.
    pub(super) fn is_here(&self, addr: IpAddr) -> bool {
        self.own.addresses.contains(&addr) || self.own.is_behind(addr)
    }

    /// True if an address is another's that peers reach in this host's name.
    pub(super) fn is_beyond(&self, addr: IpAddr) -> bool {
        let holds = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&addr));
        holds(&self.own.exit) && !holds(&self.own.closed) && !self.is_here(addr)
    }

    /// True if this host speaks for an address to its peers.
    pub(crate) fn is_ours(&self, addr: IpAddr) -> bool {
        self.is_here(addr) || self.is_beyond(addr)
    }

    /// True if an address is of a path's interface, or of a network that this host forwards for.
    pub(crate) fn is_reachable(&self, addr: IpAddr) -> bool {
        self.own.reachable.contains(&addr) || self.own.is_behind(addr)
    }
}

/// Journal of a node: what its owner is told.
#[derive(Default)]
pub(crate) struct Journal {
    pub(crate) counters: Counters,
    pub(crate) events: Events,
    /// Bytes of UDP payload that sessions sent and opened, by local path.
    pub(super) carried: Vec<u64>,
}

impl Journal {
    pub(crate) fn count(&mut self, counter: Counter) {
        self.counters.count(counter);
    }

    /// A session sent so many bytes by a local path, or opened them.
    pub(super) fn note_carried(&mut self, local: PathIndex, bytes: u64) {
        self.carried[local.get()] += bytes;
    }
}

/// Dice: random numbers, drawn in blocks.
pub(crate) struct Dice {
    pub(crate) rng: SeededRandom,
    /// Numbers drawn and not used yet.
    numbers: Vec<u64>,
}

impl Dice {
    pub(crate) fn random_u64(&mut self) -> u64 {
        // The generator works in blocks; a number alone would cost as much as these.
        if self.numbers.is_empty() {
            let mut bytes = [0; 512];
            self.rng.fill(&mut bytes);
            let numbers = bytes.as_chunks::<8>().0.iter();
            self.numbers.extend(numbers.map(|b| u64::from_le_bytes(*b)));
        }
        self.numbers.pop().expect("it was just filled")
    }

    /// Uniform in `0..=max`.
    pub(crate) fn random_below(&mut self, max: u64) -> u64 {
        match max.checked_add(1) {
            Some(n) => self.random_u64() % n,
            None => self.random_u64(),
        }
    }
}

/// See the module. Functions are handed the part that they need.
pub(crate) struct Shared {
    pub(crate) setup: Setup,
    pub(crate) journal: Journal,
    pub(crate) dice: Dice,
    pub(crate) pool: Pool,
    pub(crate) injector: Injector,
    pub(super) scratch: Scratch,
    /// Random bytes for those that split.
    pub(super) pads: Pads,
    /// More packets of the kernel's are to be handed over at once.
    pub(crate) more_comes: bool,
}

impl Shared {
    pub(super) fn new(
        rng: SeededRandom,
        local: Vec<LocalPath>,
        (bumps, pads): (Vec<Bump>, Pads),
        own: Own,
        policy: Policy,
    ) -> Self {
        let numbers = Vec::new();
        let mut dice = Dice { rng, numbers };
        Self {
            journal: Journal {
                carried: vec![0; local.len()],
                ..Journal::default()
            },
            setup: Setup {
                local: LocalPaths::new(local),
                bumps: Arc::new(Bumps::new(bumps)),
                own,
                policy,
                instance: dice.random_u64(),
                hash_keys: (dice.random_u64(), dice.random_u64()),
            },
            dice,
            pool: Pool::new(64),
            injector: Injector::default(),
            scratch: Scratch::default(),
            pads,
            more_comes: false,
        }
    }

    pub(crate) fn count(&mut self, counter: Counter) {
        self.journal.count(counter);
    }
}
