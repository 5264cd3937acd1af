//! Class rules: of the file and of the user, as the kernel is given them.

use std::collections::BTreeMap;

use dibs_config::{PortRange, RuleConfig};
use dibs_control::{Match, RuleId, RuleInfo, RuleOrigin, Selector};
use dibs_policy::{Binding, BumpId, ClassRule, Prefix};
use ipnet::IpNet;

use crate::startup::policy_prefix;

/// The kernel's rules that one of the user's may become.
pub const MAX_CLASSES: usize = 256;

/// Rules of the user are numbered from here, so that new rules in the file do not move them.
pub const FIRST_USER_RULE: RuleId = 1000;

/// A rule for connections to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// For the user.
    pub id: RuleId,
    /// The bump's name.
    pub bump: String,
    /// Whether what matches may go by nothing else.
    pub require: bool,
    /// Who made it.
    pub origin: RuleOrigin,
    /// As the user wrote it.
    pub selector: BTreeMap<String, String>,
    /// What the kernel is given.
    pub classes: Vec<ClassRule>,
}

impl Rule {
    /// For the user.
    pub fn info(&self) -> RuleInfo {
        RuleInfo {
            id: self.id,
            bump: self.bump.clone(),
            require: self.require,
            origin: self.origin,
            selector: self.selector.clone(),
        }
    }

    /// The bump that it puts connections on.
    pub fn bump_id(&self) -> BumpId {
        self.classes[0].bump
    }

    /// Whether a connection of this host is meant. A group is not known of a live connection, so a
    /// rule that names one is left to the kernel.
    pub fn matches(
        &self,
        local: std::net::SocketAddr,
        remote: std::net::SocketAddr,
        uid: u32,
    ) -> bool {
        self.classes.iter().any(|class| {
            class.gid.is_none()
                && class.dport.is_none_or(|port| port == remote.port())
                && class.sport.is_none_or(|port| port == local.port())
                && class.destination.is_none_or(|net| net.holds(remote.ip()))
                && class.source.is_none_or(|net| net.holds(local.ip()))
                && class.uid.is_none_or(|wanted| wanted == uid)
        })
    }
}

/// How many rules of the kernel a rule of the file becomes.
pub fn classes_of(rule: &RuleConfig) -> usize {
    let ports = |ranges: &[PortRange]| {
        let count: usize = ranges
            .iter()
            .map(|r| usize::from(r.last - r.first) + 1)
            .sum();
        count.max(1)
    };
    ports(&rule.sport)
        .saturating_mul(ports(&rule.dport))
        .saturating_mul(rule.destination.len().max(1))
}

/// A rule of the file, the `id`th.
///
/// # Errors
/// The user that it names does not exist.
pub fn of_file(id: RuleId, rule: &RuleConfig, bump: BumpId) -> Result<Rule, String> {
    let uid = match &rule.user {
        Some(name) => Some(uid_of(name)?),
        None => rule.uid,
    };
    let ports = |ranges: &[PortRange]| -> Vec<Option<u16>> {
        match ranges {
            [] => vec![None],
            _ => ranges
                .iter()
                .flat_map(|r| (r.first..=r.last).map(Some))
                .collect(),
        }
    };
    let destinations: Vec<Option<Prefix>> = match rule.destination.as_slice() {
        [] => vec![None],
        nets => nets.iter().map(|net| Some(policy_prefix(net))).collect(),
    };
    let mut classes = Vec::new();
    for &destination in &destinations {
        for sport in ports(&rule.sport) {
            for dport in ports(&rule.dport) {
                classes.push(ClassRule {
                    dport,
                    sport,
                    destination,
                    uid,
                    gid: rule.gid,
                    binding: binding(rule.require),
                    ..ClassRule::tcp(kernel_id(id), bump)
                });
            }
        }
    }
    let list = |items: Vec<String>| (!items.is_empty()).then(|| items.join(","));
    let selector = [
        (
            "sport",
            list(rule.sport.iter().map(ToString::to_string).collect()),
        ),
        (
            "dport",
            list(rule.dport.iter().map(ToString::to_string).collect()),
        ),
        ("uid", rule.uid.map(|uid| uid.to_string())),
        ("user", rule.user.clone()),
        ("gid", rule.gid.map(|gid| gid.to_string())),
        (
            "destination",
            list(rule.destination.iter().map(ToString::to_string).collect()),
        ),
    ];
    Ok(Rule {
        id,
        bump: rule.bump.clone(),
        require: rule.require,
        origin: RuleOrigin::Config,
        selector: selector
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)))
            .collect(),
        classes,
    })
}

/// A rule of the user; `peer` gives the hosts behind a peer of that name.
///
/// # Errors
/// What it names does not exist, or cannot be told before a connection exists.
pub fn of_user(
    id: RuleId,
    selector: &Selector,
    bump: (&str, BumpId),
    require: bool,
    peer: impl Fn(&str) -> Option<Vec<IpNet>>,
) -> Result<Rule, String> {
    let (name, bump_id) = bump;
    let all = Match::default();
    let wanted = match selector {
        Selector::All => &all,
        Selector::Match(wanted) if selector.names_class() => wanted,
        Selector::Match(_) | Selector::Conn(_) => {
            return Err("a rule cannot name a process or a live connection".to_owned());
        }
    };
    let named = match &wanted.peer {
        Some(name) => peer(name).ok_or_else(|| format!("there is no peer \"{name}\""))?,
        None => Vec::new(),
    };
    let destinations: Vec<Option<IpNet>> = match (&wanted.dst, named.as_slice()) {
        (dst, []) => vec![*dst],
        (None, nets) => nets.iter().copied().map(Some).collect(),
        // Where one holds the other, the narrower is what both mean.
        (Some(dst), nets) => {
            let both = |net: &IpNet| match (net.contains(dst), dst.contains(net)) {
                (true, _) => Some(Some(*dst)),
                (_, true) => Some(Some(*net)),
                _ => None,
            };
            nets.iter().filter_map(both).collect()
        }
    };
    if destinations.is_empty() {
        return Err("the destination is not behind that peer".to_owned());
    }
    let classes = destinations.iter().map(|destination| ClassRule {
        dport: wanted.dport,
        sport: wanted.sport,
        destination: destination.as_ref().map(policy_prefix),
        source: wanted.src.as_ref().map(policy_prefix),
        uid: wanted.uid,
        binding: binding(require),
        ..ClassRule::tcp(kernel_id(id), bump_id)
    });
    let mixed = |class: &ClassRule| match (class.source, class.destination) {
        (Some(source), Some(destination)) => source.family() != destination.family(),
        _ => false,
    };
    let classes: Vec<ClassRule> = classes.filter(|class| !mixed(class)).collect();
    if classes.is_empty() {
        return Err("source and destination are of different families".to_owned());
    }
    Ok(Rule {
        id,
        bump: name.to_owned(),
        require,
        origin: RuleOrigin::User,
        selector: wanted
            .terms()
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
        classes,
    })
}

fn binding(require: bool) -> Binding {
    if require {
        Binding::Required
    } else {
        Binding::Loose
    }
}

/// The number in the comment of the kernel's rules.
fn kernel_id(id: RuleId) -> u32 {
    id.try_into().unwrap_or(u32::MAX)
}

fn uid_of(name: &str) -> Result<u32, String> {
    match nix::unistd::User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(format!("there is no user \"{name}\"")),
        Err(error) => Err(format!("user \"{name}\" cannot be looked up: {error}")),
    }
}
