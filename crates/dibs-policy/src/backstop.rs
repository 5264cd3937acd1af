//! What stands when the firewall does not: a table of nftables that is the daemon's own.
//!
//! Others flush the firewall (`iptables -F`, `nft flush ruleset`), and with our chains the marks are gone
//! that take a connection to its bump. The backstop needs neither: it knows the connections on bumps
//! by their addresses and ports, and by their ctmarks, and the class rules; what should be marked and
//! is not goes nowhere. The kernel lets nobody but its owner change it (see [`crate::nft`]).

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::IpAddr;

use crate::nft::{Attributes, Change, Kind, Nft, Purpose, attribute, attributes, text};
use crate::rule::Set;
use crate::{Desired, Error, Family, rules};

pub(crate) mod ruleset;

use ruleset::{PROBE, Ruleset, TABLE};

/// linux/netfilter/nf_tables.h: of a table.
const OWNER: u32 = 0x2;
const PERSIST: u32 = 0x4;
/// The flags to try, best first: kernels from 6.9, from 5.12, and older ones.
const FLAGS: [u32; 3] = [OWNER | PERSIST, OWNER, 0];
/// Elements of one message: an attribute has 64 KiB at most.
const ELEMENTS: usize = 512;
/// Messages with elements of one transaction: what goes out together is to fit without room of its own.
const MESSAGES: usize = 4;

/// The connections that the backstop knows by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// On a bump: they never leave unmarked, whatever becomes of their conntrack entry.
    pub bumped: BTreeSet<FlowKey>,
    /// Plain by choice, whatever the class rules say.
    pub plain: BTreeSet<FlowKey>,
    /// Connections of which nothing is taken that comes in plain, before conntrack sees it.
    pub locked: BTreeSet<FlowKey>,
    /// On a bump with a source that this host gave them, by both names: without their entry nobody translates them, and what
    /// comes for them here belongs to no socket.
    pub masqueraded: BTreeSet<FlowKey>,
}

/// How well a backstop stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// Nobody else can change it, and it outlives the daemon.
    Lasting,
    /// Nobody else can change it as long as the daemon runs, and it goes with the daemon.
    WhileRunning,
    /// It withstands iptables, but not `nft flush ruleset`.
    Shared,
}

impl fmt::Display for Strength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strength::Lasting => "stands whatever others flush, and outlives the daemon",
            Strength::WhileRunning => "stands whatever others flush, as long as the daemon runs",
            Strength::Shared => "stands while others flush iptables, but not nftables",
        })
    }
}

/// State of a backstop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// There is nothing for it to stop.
    #[default]
    Idle,
    /// It does.
    Stands(Strength),
    /// It cannot: this kernel has no nftables.
    Missing,
    /// It does not, or not as it should. Why.
    Failed(String),
}

/// The table of this host. It goes with this value unless the kernel can keep it.
pub struct Backstop {
    nft: Nft,
    standing: Standing,
    strength: Option<Strength>,
    /// The kernel can do NAT in a table of ours.
    nat: bool,
    /// As last put into the kernel.
    set: Ruleset,
    known: Known,
    /// Packets dropped by rules that others have replaced since: the kernel counts by rule.
    dropped_before: u64,
}

/// What the kernel has.
struct Found {
    /// Chains with their rules' comments.
    chains: Vec<(String, Vec<String>)>,
    dropped: u64,
}

impl Backstop {
    /// Opens a socket in the network namespace of the calling thread. Needs a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        Ok(Self {
            nft: Nft::open().map_err(Error::netlink("open nftables"))?,
            standing: Standing::Idle,
            strength: None,
            nat: true,
            set: Ruleset::default(),
            known: Known::default(),
            dropped_before: 0,
        })
    }

    /// Names its own changes among those that [`Watch`](crate::Watch) hears of.
    pub fn port(&self) -> u32 {
        self.nft.port()
    }

    /// State of the backstop, as it was last seen.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Stops dropping what `desired` no longer wants dropped. To be called before markers go, and
    /// [`set`](Self::set) after they have come: so it never stands in the way of a change.
    pub async fn narrow(&mut self, desired: &Desired) -> Result<(), Error> {
        let narrowed = self
            .set
            .without_drops_beyond(&rules::nftables(desired, self.nat));
        if narrowed != self.set {
            let dropped = self.dropped_by_rules().await;
            let changes = fill(&narrowed, &self.set.names());
            match self.nft.commit(&changes).await {
                Ok(()) => self.dropped_before += dropped,
                // What is not there any more drops nothing.
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(Error::netlink("narrow the table of nftables")(error)),
            }
            self.set = narrowed;
        }
        Ok(())
    }

    /// Brings the table to `desired` and `known`, by the difference. Whether the rules that were set
    /// before were no longer there.
    pub async fn set(&mut self, desired: &Desired, known: &Known) -> Result<bool, Error> {
        let mut nat = self.nat;
        let done = loop {
            let wanted = rules::nftables(desired, nat);
            if wanted.is_empty() {
                return self.remove().await.map(|()| false);
            }
            match self.bring(&wanted, known).await {
                Err(error) if nat && is_unsupported(&error) => nat = false,
                Err(error) => break Err(self.refusal(error).await),
                Ok(undone) => {
                    self.nat = nat;
                    break Ok(undone);
                }
            }
        };
        self.standing = match (&done, self.strength) {
            (Ok(_), Some(strength)) => Standing::Stands(strength),
            (Ok(_), None) => Standing::Idle,
            (Err(Error::NoNftables), _) => Standing::Missing,
            (Err(error), _) => Standing::Failed(error.to_string()),
        };
        done
    }

    /// Has the kernel look at what `desired` needs; nothing is changed, but an earlier daemon's table becomes ours.
    ///
    /// # Errors
    /// It would not take it; [`Error::NoNftables`] if it takes nothing of the kind.
    pub async fn check(&mut self, desired: &Desired) -> Result<(), Error> {
        let mut nat = self.nat;
        loop {
            let wanted = rules::nftables(desired, nat);
            if wanted.is_empty() {
                return Ok(());
            }
            let looked_at = match self.look().await {
                Ok(found) => {
                    let content = Some(&wanted);
                    self.take_over(content, found.as_ref(), Purpose::Check)
                        .await
                }
                Err(error) => Err(error),
            };
            match looked_at {
                Ok(_) => return Ok(()),
                Err(error) if nat && is_unsupported(&error) => nat = false,
                Err(error) => return Err(self.refusal(error).await),
            }
        }
    }

    /// Why the table cannot be set up, in words for the user.
    async fn refusal(&mut self, error: io::Error) -> Error {
        // Who asks for tables where there is no nf_tables asks nobody.
        let tables = self.nft.dump(Kind::GetTable, &Attributes::default()).await;
        if tables.is_err_and(|error| is_unsupported(&error)) {
            return Error::NoNftables;
        }
        // A kernel may have nf_tables, and not the family that the table is of.
        let other = [table_called(PROBE, Kind::NewTable, Some(0))];
        let probed = self.nft.transact(&other, Purpose::Check).await;
        if is_unsupported(&error) && probed.is_err_and(|error| is_unsupported(&error)) {
            return Error::NoNftables;
        }
        let hint = match error.raw_os_error() {
            Some(libc::EMSGSIZE) => " in one piece (raise net.core.wmem_max, or have fewer rules)",
            Some(libc::EPERM) => " (does another program own it?)",
            _ => "",
        };
        Error::netlink(format!("set up the table inet {TABLE} of nftables{hint}"))(error)
    }

    async fn bring(&mut self, wanted: &Ruleset, known: &Known) -> io::Result<bool> {
        let found = self.look().await?;
        let as_wanted = found
            .as_ref()
            .is_some_and(|f| f.chains == wanted.comments());
        let undone = self.set == *wanted && !as_wanted;
        if self.strength.is_none() || !as_wanted {
            let content = (!as_wanted).then_some(wanted);
            let taken = self.take_over(content, found.as_ref(), Purpose::Commit);
            self.strength = Some(taken.await?);
            if !as_wanted {
                self.dropped_before += found.map_or(0, |found| found.dropped);
            }
        }
        self.set = wanted.clone();
        self.fill_sets(known).await?;
        Ok(undone)
    }

    /// Makes the table ours, with this content in place of what was found, if any is given.
    async fn take_over(
        &mut self,
        content: Option<&Ruleset>,
        found: Option<&Found>,
        purpose: Purpose,
    ) -> io::Result<Strength> {
        let stale: Vec<String> = found.map_or_else(Vec::new, |found| {
            found.chains.iter().map(|(name, _)| name.clone()).collect()
        });
        let tried: &[u32] = match self.strength {
            Some(strength) => &FLAGS[strength as usize..=strength as usize],
            None => &FLAGS,
        };
        let mut refused = None;
        for &flags in tried {
            let mut changes = vec![table(Kind::NewTable, Some(flags))];
            // By the transaction that makes an earlier daemon's table ours, the kernel takes no chain with a new hook.
            let owned = match found {
                Some(_) if self.strength.is_none() => self.nft.commit(&changes).await,
                _ => Ok(()),
            };
            if let Some(content) = content {
                changes.extend(fill(content, &stale));
            }
            let done = match owned {
                Ok(()) => self.nft.transact(&changes, purpose).await,
                refused => refused,
            };
            match done {
                Ok(()) => {
                    return Ok(match flags {
                        0 => Strength::Shared,
                        OWNER => Strength::WhileRunning,
                        _ => Strength::Lasting,
                    });
                }
                Err(error) if is_unsupported(&error) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.expect("some flags were tried"))
    }

    async fn fill_sets(&mut self, known: &Known) -> io::Result<()> {
        let sets = [
            (Set::Bumped, &known.bumped),
            (Set::Plain, &known.plain),
            (Set::Locked, &known.locked),
            (Set::Masqueraded, &known.masqueraded),
        ];
        let sets = sets
            .into_iter()
            .flat_map(|set| Family::BOTH.map(|family| (set, family)));
        for ((set, wanted), family) in sets {
            let name = set.name(family);
            let is_of = |ends: &&FlowKey| [ends.src, ends.dst].map(Family::of) == [family; 2];
            let wanted = wanted.iter().filter(is_of);
            let wanted: BTreeSet<Vec<u8>> = wanted.map(key).collect();
            let there = match self.elements(name).await {
                // An earlier version made the table.
                Err(error) if is_absent(&error) && wanted.is_empty() => continue,
                there => there?,
            };
            let new: Vec<&Vec<u8>> = wanted.difference(&there).collect();
            let gone: Vec<&Vec<u8>> = there.difference(&wanted).collect();
            for (kind, keys) in [(Kind::NewElement, new), (Kind::DelElement, gone)] {
                for keys in keys.chunks(ELEMENTS) {
                    self.nft.commit(&[elements(kind, name, keys)]).await?;
                }
            }
        }
        self.known = known.clone();
        Ok(())
    }

    /// Notes where connections are: all at once, as far as one transaction holds them.
    pub async fn note(&mut self, places: &[(FlowKey, Place)]) -> Result<(), Error> {
        if self.set.is_empty() {
            return Ok(());
        }
        // The last word on each.
        let places: BTreeMap<FlowKey, Place> = places.iter().copied().collect();
        let mut moves = Moves::default();
        for (ends, place) in places {
            let bumped = (Place::Bumped, &mut self.known.bumped, Set::Bumped);
            let plain = (Place::Plain, &mut self.known.plain, Set::Plain);
            for (of, known, set) in [bumped, plain] {
                let comes = place == of;
                let changed = match comes {
                    true => known.insert(ends),
                    false => known.remove(&ends),
                };
                if changed {
                    moves.note(set, ends, comes);
                }
            }
        }
        let noted = self.carry_out(&moves).await;
        self.noted(noted, "note connections in nftables")
    }

    /// Notes which connections are locked, likewise.
    pub async fn set_locked(&mut self, locked: BTreeSet<FlowKey>) -> Result<(), Error> {
        if self.set.is_empty() {
            return Ok(());
        }
        let known = std::mem::replace(&mut self.known.locked, locked);
        let mut moves = Moves::default();
        for ends in self.known.locked.difference(&known) {
            moves.note(Set::Locked, *ends, true);
        }
        for ends in known.difference(&self.known.locked) {
            moves.note(Set::Locked, *ends, false);
        }
        let noted = self.carry_out(&moves).await;
        self.noted(noted, "note locks in nftables")
    }

    /// Notes names of connections with a source that this host gave them, which come to bumps or leave them.
    pub async fn note_masqueraded(&mut self, names: &[(FlowKey, bool)]) -> Result<(), Error> {
        if self.set.is_empty() {
            return Ok(());
        }
        let mut moves = Moves::default();
        for (name, comes) in names {
            let known = &mut self.known.masqueraded;
            let changed = match comes {
                true => known.insert(*name),
                false => known.remove(name),
            };
            if changed {
                moves.note(Set::Masqueraded, *name, *comes);
            }
        }
        let noted = self.carry_out(&moves).await;
        self.noted(noted, "note translations in nftables")
    }

    /// What could not be noted the next [`set`](Self::set) brings.
    fn noted(&mut self, noted: io::Result<()>, what: &str) -> Result<(), Error> {
        let noted = noted.map_err(Error::netlink(what));
        if let Err(error) = &noted {
            self.standing = Standing::Failed(error.to_string());
        }
        noted
    }

    /// Carries moves out, as many at once as one transaction holds.
    async fn carry_out(&mut self, moves: &Moves) -> io::Result<()> {
        let mut done = Ok(());
        for changes in moves.changes(ELEMENTS).chunks(MESSAGES) {
            if self.nft.commit(changes).await.is_err() {
                done = self.one_by_one(moves).await;
                break;
            }
        }
        done
    }

    /// The kernel did not do what it was told at once: what it refuses is to stand in the way of nothing else.
    async fn one_by_one(&mut self, moves: &Moves) -> io::Result<()> {
        let mut refused = Ok(());
        for change in moves.changes(1) {
            match self.nft.commit(&[change]).await {
                // It is gone by an earlier transaction, or somebody else removed the table, or some of it: the
                // next `set` makes it again.
                Err(error) if is_absent(&error) => {}
                Err(error) => refused = Err(error),
                Ok(()) => {}
            }
        }
        refused
    }

    /// Packets that it dropped, those of the table that was found included; all but what falls into the
    /// moment in which rules are written anew.
    pub async fn dropped(&mut self) -> Result<u64, Error> {
        let found = self.look().await;
        let found = found.map_err(Error::netlink("list the table of nftables"))?;
        Ok(self.dropped_before + found.map_or(0, |found| found.dropped))
    }

    /// What the rules there have dropped, as far as it can be told: counting stands in the way of nothing.
    async fn dropped_by_rules(&mut self) -> u64 {
        let found = self.look().await.unwrap_or_default();
        found.map_or(0, |found| found.dropped)
    }

    /// Removes the table, whoever left it.
    pub async fn remove(&mut self) -> Result<(), Error> {
        self.set = Ruleset::default();
        self.known = Known::default();
        self.standing = Standing::Idle;
        self.strength = None;
        let dropped = self.dropped_by_rules().await;
        match self.nft.commit(&[table(Kind::DelTable, None)]).await {
            Ok(()) => self.dropped_before += dropped,
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(Error::netlink("remove the table of nftables")(error)),
        }
        Ok(())
    }

    /// The table's chains and rules; `None` if it is not there.
    async fn look(&mut self) -> io::Result<Option<Found>> {
        // NFTA_CHAIN_TABLE, NFTA_RULE_TABLE.
        let of_table = Attributes::default().text(1, TABLE);
        let mut found = Found {
            chains: Vec::new(),
            dropped: 0,
        };
        let chains = match self.nft.dump(Kind::GetChain, &of_table).await {
            Err(error) if is_absent(&error) => return Ok(None),
            chains => chains?,
        };
        let ours = |bytes: &&Vec<u8>| attribute(bytes, 1).map(text).as_deref() == Some(TABLE);
        for chain in chains.iter().filter(ours) {
            let name = attribute(chain, 3).map(text).unwrap_or_default();
            found.chains.push((name, Vec::new()));
        }
        let rules = match self.nft.dump(Kind::GetRule, &of_table).await {
            Err(error) if is_absent(&error) => return Ok(None),
            rules => rules?,
        };
        for rule in rules.iter().filter(ours) {
            let chain = attribute(rule, 2).map(text).unwrap_or_default();
            let comment = attribute(rule, 7).map(comment).unwrap_or_default();
            found.dropped += attribute(rule, 4).map_or(0, packets);
            if let Some((_, rules)) = found.chains.iter_mut().find(|(name, _)| *name == chain) {
                rules.push(comment);
            }
        }
        found.chains.sort();
        Ok((!found.chains.is_empty()).then_some(found))
    }

    /// The keys of a set.
    async fn elements(&mut self, set: &str) -> io::Result<BTreeSet<Vec<u8>>> {
        // NFTA_SET_ELEM_LIST_TABLE, _SET, _ELEMENTS; NFTA_SET_ELEM_KEY; NFTA_DATA_VALUE.
        let query = Attributes::default().text(1, TABLE).text(2, set);
        let found = self.nft.dump(Kind::GetElement, &query).await?;
        let lists = found.iter().filter_map(|message| attribute(message, 3));
        let elements = lists.flat_map(attributes).map(|(_, element)| element);
        let keys = elements.filter_map(|element| attribute(attribute(element, 1)?, 1));
        Ok(keys.map(<[u8]>::to_vec).collect())
    }
}

/// Place of a connection, as the backstop knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On a bump.
    Bumped,
    /// Plain by choice.
    Plain,
    /// Wherever the rules put it.
    Elsewhere,
}

/// Elements that come to sets or leave them: by set, and whether they come.
#[derive(Default)]
struct Moves(BTreeMap<(&'static str, bool), Vec<Vec<u8>>>);

impl Moves {
    fn note(&mut self, set: Set, ends: FlowKey, comes: bool) {
        let name = set.name(Family::of(ends.src));
        self.0.entry((name, comes)).or_default().push(key(&ends));
    }

    /// The changes, of so many elements each at most.
    fn changes(&self, most: usize) -> Vec<Change> {
        let change = |((set, comes), keys): (&(&str, bool), &Vec<Vec<u8>>)| {
            let kind = match comes {
                true => Kind::NewElement,
                false => Kind::DelElement,
            };
            let set = *set;
            let pieces = keys.chunks(most);
            let piece =
                move |keys: &[Vec<u8>]| elements(kind, set, &keys.iter().collect::<Vec<_>>());
            pieces.map(piece).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(change).collect()
    }
}

/// There is no such table, or no nftables in this kernel.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)
    )
}

/// This kernel cannot do something of what it was asked for.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EINVAL | libc::ENOENT)
    )
}

fn table(kind: Kind, flags: Option<u32>) -> Change {
    table_called(TABLE, kind, flags)
}

fn table_called(name: &str, kind: Kind, flags: Option<u32>) -> Change {
    let mut attributes = Attributes::default().text(1, name);
    if let Some(flags) = flags {
        attributes = attributes.number(2, flags);
    }
    Change { kind, attributes }
}

/// What puts this content in place of the chains `stale`.
fn fill(content: &Ruleset, stale: &[String]) -> Vec<Change> {
    let of_chain = |name: &str| Attributes::default().text(1, TABLE).text(2, name);
    let mut changes = Vec::new();
    for name in stale {
        changes.push(Change {
            kind: Kind::DelRule,
            attributes: of_chain(name),
        });
    }
    for name in stale.iter().filter(|name| !content.has(name)) {
        changes.push(Change {
            kind: Kind::DelChain,
            attributes: Attributes::default().text(1, TABLE).text(3, name),
        });
    }
    changes.extend(ruleset::sets());
    changes.extend(content.chains.iter().map(ruleset::Chain::make));
    for chain in &content.chains {
        changes.extend(chain.rules.iter().map(|rule| rule.make(TABLE, &chain.name)));
    }
    changes
}

fn elements(kind: Kind, set: &str, keys: &[&Vec<u8>]) -> Change {
    let list = keys.iter().fold(Attributes::default(), |list, key| {
        let key = Attributes::default().bytes(1, key);
        list.nested(1, Attributes::default().nested(1, key))
    });
    let attributes = Attributes::default().text(1, TABLE).text(2, set);
    Change {
        kind,
        attributes: attributes.nested(3, list),
    }
}

/// As the rules build it from a packet: each part padded to four bytes.
fn key(ends: &FlowKey) -> Vec<u8> {
    let mut key = Vec::new();
    for (ip, port) in [(ends.src, ends.sport), (ends.dst, ends.dport)] {
        match ip {
            IpAddr::V4(ip) => key.extend(ip.octets()),
            IpAddr::V6(ip) => key.extend(ip.octets()),
        }
        key.extend(port.to_be_bytes());
        key.extend([0, 0]);
    }
    key
}

/// The comment in a rule's user data, as nft(8) keeps it: type 0, length, text.
fn comment(data: &[u8]) -> String {
    match data {
        [0, length, rest @ ..] => text(rest.get(..usize::from(*length)).unwrap_or(rest)),
        _ => String::new(),
    }
}

/// What the counters among a rule's expressions say.
fn packets(expressions: &[u8]) -> u64 {
    let counter = |expression: &[u8]| {
        // NFTA_EXPR_NAME, NFTA_EXPR_DATA, NFTA_COUNTER_PACKETS.
        let named = text(attribute(expression, 1)?) == "counter";
        let packets = attribute(attribute(expression, 2)?, 2)?.first_chunk::<8>()?;
        named.then(|| u64::from_be_bytes(*packets))
    };
    attributes(expressions)
        .filter_map(|(_, expression)| counter(expression))
        .sum()
}
