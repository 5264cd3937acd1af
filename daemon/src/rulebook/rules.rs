//! Class rules: of the file and of the user, as the kernel is given them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use dibs_config::{Claim, Conflict, DaySpan, Level, PortRange, RuleConfig, Selection};
use dibs_control::{Match, NewRule, RuleId, RuleInfo, RuleOrigin, Selector};
use dibs_io::LocalTime;
use dibs_policy::{Binding, ClassRule, DeviceName, Family, Hours, Ports};
use dibs_settings::{BumpId, Scheduler, Shows, Term};
use dibs_switch::rules::{Fit, Rule as _};
use ipnet::IpNet;

use crate::control::{Audience, ROOT};
use crate::host::interfaces::{Inventory, nobodys_name};
use crate::host::live::Live;
use crate::host::preferences::scheduler;

/// The kernel's rules that one of the user's may become.
pub const MAX_CLASSES: usize = 256;

/// Bytes of an interface's own name.
const LONGEST_NAME: usize = 15;

/// A rule for connections to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// For the user.
    pub id: RuleId,
    /// The bump's name.
    pub bump: String,
    /// How firmly it holds.
    pub level: Level,
    /// The higher is tried first.
    pub priority: i32,
    /// Maker of the rule.
    pub origin: RuleOrigin,
    /// The same by uid: root's are those of the file, too.
    pub by: u32,
    /// As the user wrote it.
    pub selector: BTreeMap<String, String>,
    /// Selection that these terms mean.
    pub selection: Selection,
    /// True if it holds at this time of day.
    pub holds: bool,
    /// Rules that the kernel is given, but for the time of day.
    pub classes: Vec<ClassRule>,
    /// The family that it is kept to, because the other's iptables does not take it.
    pub narrowed: Option<Narrowed>,
    /// Its user is not known; none: it names none, or one who is.
    pub unresolved: Option<Unresolved>,
    /// How new data of these connections is shared out over the paths; none: as that of others.
    pub scheduler: Option<Scheduler>,
}

/// See [`Rule::narrowed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Narrowed {
    /// Family for which it holds.
    pub to: Family,
    /// Why not elsewhere.
    pub why: String,
}

/// State of a rule that cannot be carried out as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// Reason in one clause.
    pub why: String,
    /// The reason is that iptables does not take it, and not that its user is not known.
    pub is_refused: bool,
    /// Nothing is steered by it until then.
    pub waits: bool,
}

impl Unresolved {
    /// Sentence for the user.
    pub(crate) fn warning(&self, rule: RuleId) -> String {
        let why = &self.why;
        let reason = match self.is_refused {
            true => "the kernel does not take it yet",
            false => "its user is not known yet",
        };
        match self.waits {
            true => format!("rule {rule} is not in force, because {reason}: {why}"),
            false => format!(
                "rule {rule} requires its bump for every user's connections to its ports and addresses, because {reason}: \
                 {why}"
            ),
        }
    }
}

impl Rule {
    /// For the user.
    pub fn info(&self) -> RuleInfo {
        RuleInfo {
            id: self.id,
            bump: self.bump.clone(),
            require: self.level == Level::Require,
            prefer: self.level == Level::Prefer,
            priority: self.priority,
            active: self.holds,
            origin: self.origin,
            selector: self.selector.clone(),
            scheduler: self.scheduler.map(|scheduler| scheduler.to_string()),
            note: self.warning(),
        }
    }

    /// The bump that it puts connections on; none: they leave directly.
    pub fn bump_id(&self) -> Option<BumpId> {
        let class = &self.classes[0];
        (class.binding != Binding::Direct).then_some(class.bump)
    }

    /// Rules in the order of this are tried one after the other: root's and the file's before those of
    /// members of the group, whatever their priority.
    pub fn order(&self) -> (bool, Reverse<i32>, RuleId) {
        (self.is_of_member(), Reverse(self.priority), self.id)
    }

    /// True if a member of the group made it.
    pub fn is_of_member(&self) -> bool {
        self.by != ROOT
    }

    /// The user who is alone in being concerned; none: others may be, too.
    pub fn only_user(&self) -> Option<u32> {
        let uid = self.classes[0].uid?;
        let all = self.classes.iter().all(|class| class.uid == Some(uid));
        all.then_some(uid)
    }

    /// The users whom it concerns.
    pub(crate) fn audience(&self) -> Audience {
        Audience::of(self.only_user())
    }

    /// Whether a live connection of this host is meant.
    pub(crate) fn means(&self, live: &Live) -> bool {
        self.fit(live) == Fit::Means
    }

    /// Fit of a connection of this host. What shows only as it sends is not known of a live
    /// connection, so a rule that names such is left to the kernel.
    pub fn matches(&self, local: SocketAddr, remote: SocketAddr, uid: Option<u32>) -> Fit {
        match (self.may_match(local, remote, uid), self.is_the_kernels()) {
            (false, _) => Fit::Not,
            (true, true) => Fit::May,
            (true, false) => Fit::Means,
        }
    }

    /// Whether a connection fits in all that is known of it. One that only passes this host has no `uid`,
    /// and nothing else that a socket has.
    fn may_match(&self, local: SocketAddr, remote: SocketAddr, uid: Option<u32>) -> bool {
        let family = match remote.is_ipv4() {
            true => Family::V4,
            false => Family::V6,
        };
        self.holds_in(family)
            && self.classes.iter().any(|class| {
                class
                    .dport
                    .is_none_or(|ports| ports.contains(remote.port()))
                    && class.sport.is_none_or(|ports| ports.contains(local.port()))
                    && class
                        .destination
                        .is_none_or(|net| net.contains(&remote.ip()))
                    && class.source.is_none_or(|net| net.contains(&local.ip()))
                    && class.uid.is_none_or(|wanted| Some(wanted) == uid)
                    && (uid.is_some() || !class.is_of_sockets())
            })
    }

    /// Whether only the kernel can tell which connections are meant.
    fn is_the_kernels(&self) -> bool {
        self.classes.iter().any(ClassRule::shows_only_sending)
    }

    /// Rules that the kernel is given, with this offset of the local time from UTC in seconds.
    pub fn kernel_classes(&self, offset: i32) -> impl Iterator<Item = ClassRule> {
        let span = { self.selection.time() }.filter(|_| self.unresolved.is_none());
        let hours = span.map(|span| hours(*span, offset));
        let family = self.narrowed.as_ref().map(|narrowed| narrowed.to);
        let waits = self.waits();
        let meant =
            move |class: &&ClassRule| !waits && family.is_none_or(|family| class.concerns(family));
        let classes = self.classes.iter().filter(meant);
        classes.map(move |class| ClassRule {
            hours,
            family,
            ..class.clone()
        })
    }

    /// The same with interfaces as the kernel's rules have to name them on this host.
    pub fn classes_here(
        &self,
        offset: i32,
        inventory: &Inventory,
    ) -> impl Iterator<Item = ClassRule> {
        let interface = self.selection.interface();
        let interface = interface.map(|name| inventory.device_name(name));
        self.kernel_classes(offset).map(move |class| ClassRule {
            interface: interface.clone(),
            ..class
        })
    }

    /// True if it means connections of a family at all.
    pub fn concerns(&self, family: Family) -> bool {
        self.classes.iter().any(|class| class.concerns(family))
    }

    /// Whether the kernel has it for a family.
    fn holds_in(&self, family: Family) -> bool {
        let narrowed = self.narrowed.as_ref();
        narrowed.is_none_or(|narrowed| narrowed.to == family)
    }

    /// Why this rule and another cannot both be.
    pub fn conflict(&self, other: &Rule) -> Option<Conflict> {
        self.claim().conflict(other.claim())
    }

    fn claim(&self) -> Claim<'_> {
        Claim {
            selection: &self.selection,
            bump: &self.bump,
            level: self.level,
            scheduler: self.scheduler,
        }
    }

    /// Sentence for the user, if it is kept to one family, or its user is not known.
    pub fn warning(&self) -> Option<String> {
        if let Some(unresolved) = &self.unresolved {
            return Some(unresolved.warning(self.id));
        }
        let Narrowed { to, why } = self.narrowed.as_ref()?;
        let (id, to) = (self.id, name(*to));
        Some(match self.level {
            Level::Require => {
                format!("rule {id} requires its bump, but is in force for {to} only: {why}")
            }
            _ => format!("rule {id} is in force for {to} only: {why}"),
        })
    }

    /// Notes whether it holds now; whether that is news.
    pub fn turn(&mut self, now: LocalTime) -> bool {
        let before = self.holds;
        self.holds = match &self.unresolved {
            Some(unresolved) => !unresolved.waits,
            None => holds(&self.selection, now),
        };
        before != self.holds
    }
}

impl dibs_switch::rules::Rule<Live> for Rule {
    fn bump(&self) -> Option<BumpId> {
        self.bump_id()
    }

    fn level(&self) -> Level {
        self.level
    }

    fn fit(&self, live: &Live) -> Fit {
        self.matches(live.local(), live.pair.destination(), live.uid)
    }
}

/// For the user.
pub fn name(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

fn holds(selection: &Selection, now: LocalTime) -> bool {
    let minute = u16::try_from(now.second_of_day / 60).expect("a day has few minutes");
    let span = selection.time();
    span.is_none_or(|span| span.contains(minute))
}

/// The kernel knows UTC only.
fn hours(span: DaySpan, offset: i32) -> Hours {
    let utc = |minute: u16| {
        let second = (i64::from(minute) * 60 - i64::from(offset)).rem_euclid(86_400);
        u32::try_from(second).expect("a day has few seconds")
    };
    Hours {
        start: utc(span.start),
        end: utc(span.end),
    }
}

/// How many rules of the kernel a rule of the file becomes.
pub fn classes_of(rule: &RuleConfig) -> usize {
    let selection = &rule.selection;
    let ports = [selection.sport(), selection.dport()].map(|ports| ports.map_or(1, Vec::len));
    let nets = [selection.source(), selection.destination()].map(|nets| nets.map_or(1, Vec::len));
    ports.into_iter().chain(nets).fold(1, usize::saturating_mul)
}

/// A rule of the file, the `id`th.
///
/// # Errors
/// What it names does not exist, or cannot be.
pub fn of_file(
    id: RuleId,
    rule: &RuleConfig,
    bump: Option<BumpId>,
    now: LocalTime,
) -> Result<Rule, String> {
    let uid = match rule.selection.user() {
        Some(name) => Some(uid_of(name)?),
        None => rule.selection.uid().copied(),
    };
    Ok(Rule {
        id,
        bump: rule.bump.clone(),
        level: rule.level,
        priority: rule.priority,
        origin: RuleOrigin::Config,
        by: ROOT,
        selector: words(rule.selection.terms()).collect(),
        holds: holds(&rule.selection, now),
        classes: classes(id, &rule.selection, uid, bump, rule.level)?,
        narrowed: None,
        unresolved: None,
        selection: rule.selection.clone(),
        scheduler: rule.scheduler,
    })
}

/// A rule that the user `by` made; `peer` gives the hosts behind a peer of that name.
///
/// # Errors
/// What it names does not exist, or cannot be told before a connection exists.
pub fn of_user(
    id: RuleId,
    wanted: &NewRule,
    by: u32,
    bump: Option<BumpId>,
    now: LocalTime,
    peer: impl Fn(&str) -> Option<Vec<IpNet>>,
) -> Result<Rule, String> {
    let level = match (wanted.require, wanted.prefer) {
        (true, true) => return Err("a rule has both require and prefer".to_owned()),
        (true, false) => Level::Require,
        (false, true) => Level::Prefer,
        (false, false) => Level::Usual,
    };
    let all = Match::default();
    let named = match &wanted.selector {
        Selector::All => &all,
        Selector::Match(named) if wanted.selector.names_class() => named,
        Selector::Match(_) | Selector::Conn(_) => {
            return Err("a rule cannot name a process or a live connection".to_owned());
        }
    };
    let ports = |port: u16| {
        vec![PortRange {
            first: port,
            last: port,
        }]
    };
    let nets = |nets: Vec<IpNet>| Some(nets).filter(|nets| !nets.is_empty());
    let ends = [
        named.sport.map(ports).map(Term::Sport),
        named.dport.map(ports).map(Term::Dport),
        named.src.map(|net| Term::Source(vec![net])),
        nets(destinations(named, peer)?).map(Term::Destination),
        named.uid.map(Term::Uid),
    ];
    let parse = |(key, text): (&str, String)| {
        Term::parse(key, &text).map_err(|wrong| format!("{key} {wrong}"))
    };
    let further = wanted.terms.iter().map(parse);
    let further = further.collect::<Result<Vec<Term>, String>>()?;
    let selector = { named.terms().into_iter() }
        .map(|(key, value)| (key.to_owned(), value))
        .chain(words(&further))
        .collect();
    let ends = ends.into_iter().flatten();
    let selection: Selection = ends.chain(further).collect();
    if let (Level::Require, Some(key)) = (level, selection.shows(&[Shows::Sending])) {
        return Err(format!(
            "a rule with {key} cannot require its bump, because {key} is known only when a packet is sent"
        ));
    }
    let sending = selection.shows(&[Shows::Sending]);
    let has_more = level != Level::Usual || wanted.scheduler.is_some() || sending.is_some();
    if bump.is_none() && has_more {
        return Err(
            "a rule that lets connections leave directly names ports, addresses, uid or user, and time alone"
                .to_owned(),
        );
    }
    if let Some(why) = wanted.scheduler_fault() {
        return Err(why);
    }
    let scheduler = wanted.scheduler.as_deref().map(scheduler).transpose()?;
    Ok(Rule {
        id,
        bump: wanted.bump.clone(),
        level,
        priority: wanted.priority,
        origin: RuleOrigin::User,
        by,
        selector,
        holds: holds(&selection, now),
        classes: classes(id, &selection, named.uid, bump, level)?,
        narrowed: None,
        unresolved: None,
        selection,
        scheduler,
    })
}

/// Terms as the user wrote them, by key.
fn words(terms: &[Term]) -> impl Iterator<Item = (String, String)> {
    let terms = terms.iter();
    terms.map(|term| (term.key().to_owned(), term.to_string()))
}

/// The hosts that a user means.
fn destinations(
    wanted: &Match,
    peer: impl Fn(&str) -> Option<Vec<IpNet>>,
) -> Result<Vec<IpNet>, String> {
    let named = match &wanted.peer {
        Some(name) => peer(name).ok_or_else(|| format!("there is no peer \"{name}\""))?,
        None => return Ok(wanted.dst.into_iter().collect()),
    };
    let Some(dst) = wanted.dst else {
        return Ok(named);
    };
    // Where one holds the other, the narrower is what both mean.
    let both = |net: &IpNet| match (net.contains(&dst), dst.contains(net)) {
        (true, _) => Some(dst),
        (_, true) => Some(*net),
        _ => None,
    };
    let narrowed: Vec<IpNet> = named.iter().filter_map(both).collect();
    match narrowed.is_empty() {
        true => Err("the destination does not belong to that peer".to_owned()),
        false => Ok(narrowed),
    }
}

/// Why a rule cannot stand beside others, in one clause.
pub fn contradicted(rule: &Rule, others: &[Rule]) -> Option<String> {
    others.iter().find_map(|other| contradiction(rule, other))
}

fn contradiction(rule: &Rule, other: &Rule) -> Option<String> {
    let conflict = rule.conflict(other)?;
    Some(format!(
        "it {conflict} as rule {}, for \"{}\"",
        other.id, other.bump
    ))
}

/// A rule that gives way to a new one, and why, in one clause.
pub type Displaced = (Rule, String);

/// The rules that give way to a new one: root displaces members of the group.
///
/// # Errors
/// It contradicts one that does not, in one clause.
pub fn displaced(rule: &Rule, others: &[Rule]) -> Result<Vec<Displaced>, String> {
    let (weak, firm): (Vec<&Rule>, Vec<&Rule>) = others
        .iter()
        .partition(|other| other.is_of_member() && !rule.is_of_member());
    if let Some(why) = firm.iter().find_map(|other| contradiction(rule, other)) {
        return Err(why);
    }
    let gives_way = |other: &&Rule| Some(((*other).clone(), contradiction(other, rule)?));
    Ok(weak.iter().filter_map(gives_way).collect())
}

/// Rules for the kernel that a selection becomes, whose user has this number.
pub(crate) fn classes(
    id: RuleId,
    selection: &Selection,
    uid: Option<u32>,
    bump: Option<BumpId>,
    level: Level,
) -> Result<Vec<ClassRule>, String> {
    let interface = match selection.interface() {
        // An alternative name may be longer than any of its own: see `Inventory::device_name`.
        Some(name) if name.len() > LONGEST_NAME => Some(nobodys_name(name)),
        Some(name) => Some(DeviceName::new(name).map_err(|error| error.to_string())?),
        None => None,
    };
    let written = selection.terms().iter().filter(|term| term.is_as_written());
    let common = ClassRule {
        uid,
        interface,
        terms: written.cloned().collect(),
        binding: match level {
            _ if bump.is_none() => Binding::Direct,
            Level::Require => Binding::Required,
            Level::Usual => Binding::Loose,
            Level::Prefer => Binding::Preferred,
        },
        // A direct one concerns all bumps.
        ..ClassRule::tcp(kernel_id(id), bump.unwrap_or(BumpId::SEAL))
    };
    // Without any, one class for all.
    fn each<T, U>(list: Option<&Vec<T>>, to: fn(&T) -> U) -> Vec<Option<U>> {
        match list {
            Some(list) => list.iter().map(|one| Some(to(one))).collect(),
            None => vec![None],
        }
    }
    let ports = |&PortRange { first, last }: &PortRange| Ports { first, last };
    let mut classes = Vec::new();
    for source in each(selection.source(), IpNet::trunc) {
        for destination in each(selection.destination(), IpNet::trunc) {
            if let (Some(source), Some(destination)) = (source, destination)
                && Family::of(source.addr()) != Family::of(destination.addr())
            {
                continue;
            }
            for sport in each(selection.sport(), ports) {
                for dport in each(selection.dport(), ports) {
                    classes.push(ClassRule {
                        dport,
                        sport,
                        source,
                        destination,
                        ..common.clone()
                    });
                }
            }
        }
    }
    match classes.is_empty() {
        true => Err("source and destination are of different IP versions".to_owned()),
        false => Ok(classes),
    }
}

/// The number in the comment of the kernel's rules.
fn kernel_id(id: RuleId) -> u32 {
    id.try_into().unwrap_or(u32::MAX)
}

/// The number of a user. It may take as long as the host's directory of users takes to answer.
pub(crate) fn uid_of(name: &str) -> Result<u32, String> {
    match nix::unistd::User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(format!("there is no user \"{name}\"")),
        Err(error) => Err(format!("user \"{name}\" cannot be looked up: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_the_time_of_day_in_utc() {
        let Ok(Term::Time(span)) = Term::parse("time", "08:00-18:00") else {
            panic!("a part of a day");
        };
        let at = |offset| {
            let Hours { start, end } = hours(span, offset);
            (start, end)
        };
        assert_eq!(at(0), (8 * 3600, 18 * 3600));
        assert_eq!(at(2 * 3600), (6 * 3600, 16 * 3600));
        // East of the date line it began the day before, and west of it ends the day after.
        assert_eq!(at(13 * 3600), (19 * 3600, 5 * 3600));
        assert_eq!(at(-9 * 3600 - 1800), (17 * 3600 + 1800, 3 * 3600 + 1800));
        assert_eq!(at(18 * 3600), (14 * 3600, 0));
    }
}
