//! One rule, whoever carries it out: what it asks of a packet, and what follows.
//!
//! Two printers make of it what the kernel is told: text for iptables-restore, here, and messages for
//! nftables ([`nftables`]). What only one of them can say the other leaves out.

use dibs_settings::{BumpId, Term};
use ipnet::IpNet;

use crate::desired::{Hours, Ports};
use crate::{DeviceName, Family};

pub(crate) mod nftables;

/// Bits of a mark, and what they have to be, or have not to be, or become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    pub(crate) mask: u32,
    pub(crate) value: u32,
    pub(crate) is: bool,
}

/// The sets in which nftables knows connections by their ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Set {
    /// On a bump.
    Bumped,
    /// Plain by choice.
    Plain,
    /// LOCKED.
    Locked,
    /// Came by a bump, and the user exempts them from tracking (NOTRACK).
    Untracked,
    /// Answer to what the nat table gave another destination, as it is sent here.
    Translated,
    /// On a bump with a source that this host gave them: as the networks behind it send, and with that source.
    Masqueraded,
}

/// What a rule asks of a packet. In the order of iptables: addresses, devices, protocol, the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    From(IpNet),
    To(IpNet),
    /// Whether it came by a device.
    In(DeviceName, bool),
    /// Whether it leaves by it.
    Out(DeviceName, bool),
    Tcp {
        sport: Option<Ports>,
        dport: Option<Ports>,
    },
    Owner {
        uid: Option<u32>,
        gid: Option<u32>,
    },
    /// A term of the user's, as it is written.
    Term(Term),
    Hours(Hours),
    /// The packet's mark.
    Mark(Bits),
    /// Its connection's.
    CtMark(Bits),
    /// It belongs to a TCP connection, or is an ICMP error about one.
    OfTcp,
    /// Beginning of a TCP connection, or anything else.
    Begins(bool),
    /// Segment of TCP that is a reset, or another one.
    Resets(bool),
    /// Packets of a connection that the nat table of this host gave another destination: the answers, or what they answer.
    Translated {
        answers: bool,
    },
    /// Connection whose source this host changes; false: leaves.
    SourceChanged(bool),
    /// Addresses, ports or set that its answers have for the caller, whatever the nat table makes of them here.
    AsCalled(Box<Match>),
    /// Nothing: names the class rule.
    Class(u32),
    /// What only iptables can ask, in its words.
    Iptables(String),
    /// Sent by this end of a connection in the set. Only nftables can ask this and what follows.
    Among(Set),
    /// Sent by the far end of one.
    AmongBack(Set),
    /// Exempt from tracking.
    Untracked,
    /// No route leads back to the source by the device that the packet came by.
    NoWayBack,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Back to what else looks at it.
    Return,
    /// Dropped, and counted.
    Drop,
    /// On in the chain of that name, and not back here.
    Goto(String),
    /// It is to leave by a bump: iptables marks packet and connection. nftables comes behind that, so it drops what
    /// is not marked.
    Take {
        bump: BumpId,
        /// Nothing of it is taken in plain.
        lock: bool,
    },
    /// These bits of the mark are to be the connection's: iptables has them be so, nftables drops what is still without.
    Restore(u32),
    /// The connection's mark gets these bits.
    SetCtMark(Bits),
    /// Through the chain of that name and back. Only iptables can do this and what follows.
    Jump(&'static str),
    /// The packet's mark gets these bits.
    SetMark(Bits),
    /// Answered with an ICMP error of that name.
    Reject(&'static str),
    /// Its connection comes into a set, as its far end sends; where there is no room, the next rule decides. Only nftables
    /// can do this and what follows.
    Remember(Set),
    /// Source NAT to the source that it has.
    KeepSource,
    /// Source NAT to an address of this host: the one that its route has. Both can do this.
    Masquerade,
}

/// Matches, all of which have to fit, and what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) matches: Vec<Match>,
    pub(crate) verdict: Verdict,
}

impl Bits {
    /// They have to be, or become, `value`.
    pub(crate) fn are(mask: u32, value: u32) -> Self {
        let is = true;
        Self { mask, value, is }
    }

    /// They have to be something else.
    pub(crate) fn are_not(mask: u32, value: u32) -> Self {
        let is = false;
        Self { mask, value, is }
    }

    fn text(self) -> String {
        format!("{:#x}/{:#x}", self.value, self.mask)
    }
}

impl Set {
    pub(crate) const ALL: [Set; 6] = [
        Set::Bumped,
        Set::Plain,
        Set::Locked,
        Set::Untracked,
        Set::Translated,
        Set::Masqueraded,
    ];

    /// Its name in nftables.
    pub(crate) fn name(self, family: Family) -> &'static str {
        match (self, family) {
            (Set::Bumped, Family::V4) => "bumped4",
            (Set::Bumped, Family::V6) => "bumped6",
            (Set::Plain, Family::V4) => "plain4",
            (Set::Plain, Family::V6) => "plain6",
            (Set::Locked, Family::V4) => "locked4",
            (Set::Locked, Family::V6) => "locked6",
            (Set::Untracked, Family::V4) => "untracked4",
            (Set::Untracked, Family::V6) => "untracked6",
            (Set::Translated, Family::V4) => "translated4",
            (Set::Translated, Family::V6) => "translated6",
            (Set::Masqueraded, Family::V4) => "masqueraded4",
            (Set::Masqueraded, Family::V6) => "masqueraded6",
        }
    }
}

impl Match {
    /// In the words of iptables; none where it has none.
    fn iptables(&self) -> Option<String> {
        let prefix = |option: &str, prefix: &IpNet| match prefix.prefix_len() {
            0 => String::new(),
            _ => format!("{option} {prefix}"),
        };
        let not = |is: bool| if is { "" } else { "! " };
        Some(match self {
            Match::From(net) => prefix("-s", net),
            Match::To(net) => prefix("-d", net),
            Match::In(device, is) => format!("{}-i {device}", not(*is)),
            Match::Out(device, is) => format!("{}-o {device}", not(*is)),
            Match::Tcp { sport, dport } => tcp(*sport, *dport),
            Match::Owner { uid, gid } => {
                let uid = uid.map(|uid| format!(" --uid-owner {uid}"));
                let gid = gid.map(|gid| format!(" --gid-owner {gid}"));
                let [uid, gid] = [uid, gid].map(Option::unwrap_or_default);
                format!("-m owner{uid}{gid}")
            }
            Match::Term(term) => words_of(term),
            Match::Hours(hours) => {
                let (first, last) = (time(hours.start), time(hours.last()));
                format!("-m time --timestart {first} --timestop {last}")
            }
            Match::Mark(bits) => format!("-m mark {}--mark {}", not(bits.is), bits.text()),
            Match::CtMark(bits) => format!("-m connmark {}--mark {}", not(bits.is), bits.text()),
            Match::OfTcp => "-m conntrack --ctproto 6".to_owned(),
            Match::Begins(is) => {
                let flags = "--tcp-flags FIN,SYN,RST,ACK SYN";
                format!("-p tcp -m tcp {}{flags}", not(*is))
            }
            Match::Resets(is) => format!("-p tcp -m tcp {}--tcp-flags RST RST", not(*is)),
            Match::Translated { answers } => {
                let direction = if *answers { "REPLY" } else { "ORIGINAL" };
                format!("-m conntrack --ctstate DNAT --ctdir {direction}")
            }
            Match::SourceChanged(is) => {
                format!("-m conntrack {}--ctstate SNAT", not(*is))
            }
            Match::AsCalled(part) => as_called(part)?,
            Match::Class(id) => format!("-m comment --comment {}", label(*id)),
            Match::Iptables(words) => words.clone(),
            Match::Among(_) | Match::AmongBack(_) | Match::Untracked | Match::NoWayBack => {
                return None;
            }
        })
    }
}

impl Verdict {
    fn iptables(&self) -> Option<String> {
        Some(match self {
            Verdict::Return => "-j RETURN".to_owned(),
            Verdict::Drop => "-j DROP".to_owned(),
            Verdict::Goto(chain) => format!("-g DIBS-{chain}"),
            Verdict::Take { bump, lock: false } => format!("-g DIBS-SET-{bump}"),
            Verdict::Take { bump, lock: true } => format!("-g DIBS-LOCK-{bump}"),
            Verdict::Restore(mask) => {
                format!("-j CONNMARK --restore-mark --nfmask {mask:#x} --ctmask {mask:#x}")
            }
            Verdict::SetCtMark(bits) => format!("-j CONNMARK --set-xmark {}", bits.text()),
            Verdict::Jump(chain) => format!("-j DIBS-{chain}"),
            Verdict::SetMark(bits) => format!("-j MARK --set-xmark {}", bits.text()),
            Verdict::Reject(answer) => format!("-j REJECT --reject-with {answer}"),
            Verdict::Masquerade => "-j MASQUERADE".to_owned(),
            Verdict::Remember(_) | Verdict::KeepSource => return None,
        })
    }
}

impl Rule {
    pub(crate) fn new(matches: impl Into<Vec<Match>>, verdict: Verdict) -> Self {
        Self {
            matches: matches.into(),
            verdict,
        }
    }

    /// The rule, of packets of which this is asked as well.
    pub(crate) fn and(mut self, more: Option<Match>) -> Self {
        self.matches.extend(more);
        self
    }

    /// As iptables-save shows it, without its chain; none where iptables cannot say it.
    pub(crate) fn iptables(&self) -> Option<String> {
        let matches = self.matches.iter().map(Match::iptables);
        let mut words = matches.collect::<Option<Vec<String>>>()?;
        words.retain(|word| !word.is_empty());
        words.sort_by_key(|word| word.starts_with("-m"));
        words.push(self.verdict.iptables()?);
        Some(words.join(" "))
    }
}

/// A term in the words of iptables; nothing of one that is asked by other matches.
fn words_of(term: &Term) -> String {
    match term {
        Term::Dscp(dscp) => format!("-m dscp --dscp {dscp:#04x}"),
        Term::Match(expr) => expr.to_string(),
        Term::Dport(_) | Term::Sport(_) | Term::Source(_) | Term::Destination(_) => String::new(),
        Term::Uid(_) | Term::User(_) | Term::Gid(_) => String::new(),
        Term::Interface(_) | Term::Time(_) => String::new(),
    }
}

fn tcp(sport: Option<Ports>, dport: Option<Ports>) -> String {
    let mut text = "-p tcp".to_owned();
    if sport.is_some() || dport.is_some() {
        text += " -m tcp";
    }
    for (option, ports) in [("--sport", sport), ("--dport", dport)] {
        text += &ports.map_or_else(String::new, |ports| format!(" {option} {ports}"));
    }
    text
}

/// The ends of a connection in the words of iptables, of the answers as the caller knows them.
fn as_called(part: &Match) -> Option<String> {
    let address = |option: &str, net: &IpNet| match net.prefix_len() {
        0 => String::new(),
        length if length == net.max_prefix_len() => {
            format!("-m conntrack {option} {}", net.addr())
        }
        _ => format!("-m conntrack {option} {net}"),
    };
    Some(match part {
        Match::From(net) => address("--ctorigdst", net),
        Match::To(net) => address("--ctorigsrc", net),
        Match::Tcp { sport, dport } => {
            let ports = |option: &str, ports: &Option<Ports>| {
                ports.map_or_else(String::new, |ports| format!(" {option} {ports}"))
            };
            let (from, to) = (
                ports("--ctorigsrcport", dport),
                ports("--ctorigdstport", sport),
            );
            format!("-m conntrack --ctproto 6{from}{to}")
        }
        _ => return None,
    })
}

/// Names a class rule in what the kernel lists.
fn label(id: u32) -> String {
    format!("dibs-rule-{id}")
}

/// As iptables writes seconds after midnight.
fn time(seconds: u32) -> String {
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}
