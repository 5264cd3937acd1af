//! Terms: what the connections of a rule have in common, as the configuration names it.
//!
//! A new term is a line of `terms!` and an arm of its text here; what steers prints it, and the command line takes it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{MatchExpr, Wrong};

/// Form of a term in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A string or a whole number, or a list of them.
    Words,
    /// A string or a whole number.
    Word,
    /// A string.
    Text,
    /// A whole number.
    Number,
}

/// Place where it shows that a connection fits a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// The clock.
    Clock,
    /// Its addresses and ports.
    Ends,
    /// Its socket.
    Socket,
    /// Packets that this host sends alone: what comes in cannot be told by it.
    Sending,
}

/// Terms in the order in which users are told of them: with key, form, place, and how their text is read.
macro_rules! terms {
    ($($(#[$doc:meta])* $term:ident($type:ty): $key:literal, $form:ident, $shows:ident, $parse:expr;)*) => {
        /// One thing that connections have in common.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Term {
            $($(#[$doc])* $term($type),)*
        }

        impl Term {
            /// All keys.
            pub fn keys() -> impl Iterator<Item = &'static str> {
                [$($key),*].into_iter()
            }

            /// Form of the term of a key, and the place where it shows.
            pub fn kind(key: &str) -> Option<(Form, Shows)> {
                Some(match key {
                    $($key => (Form::$form, Shows::$shows),)*
                    _ => return None,
                })
            }

            /// Its key in the file.
            pub const fn key(&self) -> &'static str {
                match self {
                    $(Self::$term(_) => $key,)*
                }
            }

            /// Place where it shows.
            pub const fn shows(&self) -> Shows {
                match self {
                    $(Self::$term(_) => Shows::$shows,)*
                }
            }

            /// The term of a key, of a text as the file has it; of a list one element.
            ///
            /// # Errors
            /// The text says nothing of that kind, or there is no such key.
            pub fn parse(key: &str, text: &str) -> Result<Self, Wrong> {
                match key {
                    $($key => $parse(text).map(Self::$term),)*
                    _ => Err(Wrong::bare("is nothing that a rule names")),
                }
            }
        }
    };
}

terms! {
    /// Remote ports.
    Dport(Vec<PortRange>): "dport", Words, Ends, ports;
    /// Local ports.
    Sport(Vec<PortRange>): "sport", Words, Ends, ports;
    /// Owner of the socket by number.
    Uid(u32): "uid", Number, Socket, number;
    /// Owner of the socket by name.
    User(String): "user", Text, Socket, user;
    /// Group of the socket.
    Gid(u32): "gid", Number, Sending, number;
    /// Local addresses.
    Source(Vec<IpNet>): "source", Words, Ends, nets;
    /// Remote addresses.
    Destination(Vec<IpNet>): "destination", Words, Ends, nets;
    /// The interface by which the ordinary route leads.
    Interface(String): "interface", Text, Sending, steered_interface;
    /// Differentiated services code point of what is sent.
    Dscp(u8): "dscp", Word, Sending, dscp;
    /// When the rule holds.
    Time(DaySpan): "time", Text, Clock, day_span;
    /// Further matches of iptables.
    Match(MatchExpr): "match", Text, Sending, MatchExpr::parse;
}

fn ports(text: &str) -> Result<Vec<PortRange>, Wrong> {
    port_range(text).map(|range| vec![range])
}

fn nets(text: &str) -> Result<Vec<IpNet>, Wrong> {
    steered_prefix(text).map(|net| vec![net])
}

impl Term {
    /// True if there may be connections that fit both. What only the kernel can tell may be so.
    pub fn meets(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Sport(a), Self::Sport(b)) | (Self::Dport(a), Self::Dport(b)) => {
                any(a, b, |a, b| a.first <= b.last && b.first <= a.last)
            }
            (Self::Source(a), Self::Source(b)) | (Self::Destination(a), Self::Destination(b)) => {
                any(a, b, |a, b| a.contains(b) || b.contains(a))
            }
            (Self::Time(a), Self::Time(b)) => a.contains(b.start) || b.contains(a.start),
            (Self::Match(_), Self::Match(_)) => true,
            _ => self.key() != other.key() || self == other,
        }
    }

    /// True if only connections of this host's own have it: a socket, or the device that is found before the packet is
    /// marked.
    pub fn is_of_sockets(&self) -> bool {
        match self {
            Self::Uid(_) | Self::User(_) | Self::Gid(_) | Self::Interface(_) => true,
            Self::Match(expr) => expr.is_of_sockets(),
            _ => false,
        }
    }

    /// True if it takes what not every kernel or iptables has.
    pub fn is_special(&self) -> bool {
        self.shows() != Shows::Ends && !matches!(self, Self::Interface(_))
    }

    /// True if the kernel is told it as it is written: it is no end of a connection, and nothing has to be looked up, or
    /// changes.
    pub fn is_as_written(&self) -> bool {
        let by_ends = matches!(self.shows(), Shows::Ends | Shows::Clock);
        !by_ends && !matches!(self, Self::Uid(_) | Self::User(_) | Self::Interface(_))
    }

    /// The same with more of a list.
    fn join(&mut self, more: Self) {
        match (self, more) {
            (Self::Sport(all), Self::Sport(more)) | (Self::Dport(all), Self::Dport(more)) => {
                all.extend(more);
            }
            (Self::Source(all), Self::Source(more))
            | (Self::Destination(all), Self::Destination(more)) => all.extend(more),
            (term, other) => *term = other,
        }
    }

    /// Lists in order, without what they have twice.
    fn sorted(mut self) -> Self {
        match &mut self {
            Self::Sport(ports) | Self::Dport(ports) => {
                ports.sort_unstable();
                ports.dedup();
            }
            Self::Source(nets) | Self::Destination(nets) => {
                nets.sort_unstable();
                nets.dedup();
            }
            _ => {}
        }
        self
    }
}

/// As the user writes it.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: ToString>(items: &[T]) -> String {
            items.iter().map(T::to_string).collect::<Vec<_>>().join(",")
        }
        match self {
            Self::Sport(ports) | Self::Dport(ports) => f.write_str(&list(ports)),
            Self::Source(nets) | Self::Destination(nets) => f.write_str(&list(nets)),
            Self::Uid(id) | Self::Gid(id) => id.fmt(f),
            Self::User(name) | Self::Interface(name) => f.write_str(name),
            Self::Dscp(dscp) => dscp.fmt(f),
            Self::Time(span) => span.fmt(f),
            Self::Match(expr) => expr.fmt(f),
        }
    }
}

/// Connections that fit every term; of each kind there is one at most. Without any, all fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection(Vec<Term>);

/// Getters of the terms that others than the kernel look at.
macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $term:ident => $type:ty;)*) => {$(
        $(#[$doc])*
        pub fn $name(&self) -> Option<&$type> {
            self.0.iter().find_map(|term| match term {
                Term::$term(value) => Some(value),
                _ => None,
            })
        }
    )*};
}

impl Selection {
    getters! {
        /// Remote ports.
        dport: Dport => Vec<PortRange>;
        /// Local ports.
        sport: Sport => Vec<PortRange>;
        /// Local addresses.
        source: Source => Vec<IpNet>;
        /// Remote addresses.
        destination: Destination => Vec<IpNet>;
        /// Owner of the socket by number. Not together with `user`.
        uid: Uid => u32;
        /// Owner of the socket by name.
        user: User => String;
        /// The interface by which the ordinary route leads.
        interface: Interface => String;
        /// When the rule holds.
        time: Time => DaySpan;
        /// Further matches of iptables.
        match_expr: Match => MatchExpr;
    }

    /// Its terms.
    pub fn terms(&self) -> &[Term] {
        &self.0
    }

    /// Names one thing more: of a list another element, of anything else another value.
    pub fn add(&mut self, term: Term) {
        match self.0.iter_mut().find(|other| other.key() == term.key()) {
            Some(other) => other.join(term),
            None => self.0.push(term),
        }
    }

    /// The same without the terms of a key.
    pub fn without(&self, key: &str) -> Self {
        let kept = self.0.iter().filter(|term| term.key() != key);
        Self(kept.cloned().collect())
    }

    /// The key of the first term that shows in one of these places.
    pub fn shows(&self, places: &[Shows]) -> Option<&'static str> {
        let mut terms = self.0.iter();
        terms
            .find(|term| places.contains(&term.shows()))
            .map(Term::key)
    }

    /// True if some source and some destination are of one IP version.
    pub fn can_match(&self) -> bool {
        let ends = self.source().zip(self.destination());
        let same = |a: &IpNet, b: &IpNet| a.addr().is_ipv4() == b.addr().is_ipv4();
        ends.is_none_or(|(source, destination)| any(source, destination, same))
    }

    /// True if both select the same.
    pub fn is_same(&self, other: &Self) -> bool {
        let [one, other] = [self, other].map(|selection| {
            let terms = selection.0.iter().cloned();
            let terms = terms.map(|term| (term.key(), term.sorted()));
            terms.collect::<BTreeMap<_, _>>()
        });
        one == other
    }

    /// True if there may be connections that both select.
    pub fn may_meet(&self, other: &Self) -> bool {
        let mut terms = self.0.iter();
        terms.all(|term| other.0.iter().all(|other| term.meets(other)))
    }
}

impl FromIterator<Term> for Selection {
    fn from_iter<I: IntoIterator<Item = Term>>(terms: I) -> Self {
        let mut selection = Self::default();
        terms.into_iter().for_each(|term| selection.add(term));
        selection
    }
}

fn any<T>(a: &[T], b: &[T], meet: impl Fn(&T, &T) -> bool) -> bool {
    a.iter().any(|a| b.iter().any(|b| meet(a, b)))
}

/// Ports `first..=last`, `first <= last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortRange {
    /// Lowest, at least 1.
    pub first: u16,
    /// Highest.
    pub last: u16,
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// A part of each day by the host's local time, from `start` up to, not including, `end`, in
/// minutes after midnight. `end` below `start` reaches into the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaySpan {
    /// 0 to 1439.
    pub start: u16,
    /// 0 to 1439, not `start`.
    pub end: u16,
}

impl DaySpan {
    /// True if a minute after midnight lies within.
    pub fn contains(self, minute: u16) -> bool {
        if self.start < self.end {
            (self.start..self.end).contains(&minute)
        } else {
            minute >= self.start || minute < self.end
        }
    }
}

impl fmt::Display for DaySpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = (self.start, self.end);
        write!(
            f,
            "{:02}:{:02}-{:02}:{:02}",
            start / 60,
            start % 60,
            end / 60,
            end % 60
        )
    }
}

/// The number of a user or group; the highest is the kernel's "none".
fn number(text: &str) -> Result<u32, Wrong> {
    let number = text.parse().ok().filter(|number| *number < u32::MAX);
    number.ok_or_else(|| Wrong::bare(format!("has to be within 0 and {}", u32::MAX - 1)))
}

/// `8000-8010`, or `80`.
pub fn port_range(text: &str) -> Result<PortRange, Wrong> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(PortRange { first, last }),
        _ if text.parse::<i128>().is_ok() => Err(Wrong::bare("has to be within 1 and 65535")),
        _ => Err(Wrong::new(
            format!(
                "\"{}\" is not a port or a range of ports",
                text.escape_debug()
            ),
            "a port is 80, a range \"8000-8010\", several [80, \"8000-8010\"]",
        )),
    }
}

/// `08:00-18:00`
fn day_span(text: &str) -> Result<DaySpan, Wrong> {
    let number = |text: &str, limit: u16| {
        let digits = text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u16>()
            .ok()
            .filter(|number| digits && *number < limit)
    };
    let minute = |text: &str| {
        let (hour, minute) = text.split_once(':')?;
        Some(number(hour, 24)? * 60 + number(minute, 60)?)
    };
    let parsed = text
        .split_once('-')
        .and_then(|(start, end)| Some((minute(start)?, minute(end)?)));
    match parsed {
        Some((start, end)) if start == end => Err(Wrong::new(
            format!("\"{text}\" is empty"),
            "leave time out for a rule that always holds",
        )),
        Some((start, end)) => Ok(DaySpan { start, end }),
        None => Err(Wrong::new(
            format!("\"{}\" is not a part of a day", text.escape_debug()),
            "write \"08:00-18:00\"",
        )),
    }
}

/// The name of a code point: RFC 2474, RFC 2597, RFC 3246, RFC 8622.
fn dscp(text: &str) -> Result<u8, Wrong> {
    let named = match text.as_bytes() {
        b"EF" => Some(46),
        b"LE" => Some(1),
        [b'C', b'S', class @ b'0'..=b'7'] => Some((class - b'0') << 3),
        [b'A', b'F', class @ b'1'..=b'4', drop @ b'1'..=b'3'] => {
            Some(((class - b'0') << 3) | ((drop - b'0') << 1))
        }
        _ => text.parse().ok().filter(|number| *number < 64),
    };
    named.ok_or_else(|| match text.parse::<i128>() {
        Ok(_) => Wrong::bare("has to be within 0 and 63"),
        Err(_) => Wrong::new(
            format!("\"{}\" is no DSCP", text.escape_debug()),
            "write 0 to 63, or \"EF\", \"CS1\", \"AF21\"",
        ),
    })
}

/// A network, or an address, which stands for itself alone.
fn prefix(text: &str) -> Result<IpNet, Wrong> {
    let parsed = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    match parsed {
        Ok(net) if net.trunc() != net => Err(Wrong::new(
            format!("\"{net}\" has bits set behind its prefix length"),
            format!("{} or {}/{}", net.trunc(), net.addr(), net.max_prefix_len()),
        )),
        Ok(net) => Ok(net),
        Err(_) => Err(Wrong::new(
            format!(
                "\"{}\" is not an address with prefix length",
                text.escape_debug()
            ),
            "write \"10.0.1.2/32\" or \"fd00::/64\"",
        )),
    }
}

/// A prefix that traffic may be steered to (docs/threat-model.md, "The peer").
pub fn steered_prefix(text: &str) -> Result<IpNet, Wrong> {
    let net = prefix(text)?;
    let address = net.network();
    if net.prefix_len() > 0 && (address.is_loopback() || address.is_multicast()) {
        let kind = if address.is_loopback() {
            "loopback"
        } else {
            "multicast"
        };
        return Err(Wrong::bare(format!(
            "\"{net}\" is {kind}, which is never steered"
        )));
    }
    Ok(net)
}

/// The name of an interface, its own or an alternative one: what the kernel takes, less what shells and iptables (`+`)
/// misread.
pub fn interface(text: &str) -> Result<String, Wrong> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-:@".contains(c);
    if (1..=127).contains(&text.len()) && text.chars().all(fits) && !text.starts_with(['-', '.']) {
        return Ok(text.to_owned());
    }
    Err(Wrong::new(
        format!(
            "\"{}\" is not the name of an interface",
            text.escape_debug()
        ),
        "letters, digits and \"_.-:@\", as `ip link` shows it, or one of its altnames there",
    ))
}

/// Interfaces of a path: the name of one, its hardware address, or a pattern of their names, in which `*` stands for any
/// characters and `?` for one.
pub fn interfaces(text: &str) -> Result<String, Wrong> {
    let named = interface(&text.replace(['*', '?'], "x")).map_err(|_| {
        Wrong::new(
            format!("\"{}\" names no interface", text.escape_debug()),
            "a name as `ip link` shows it or one of its altnames there, a hardware address, or a pattern such as \"wwan*\"",
        )
    });
    named.map(|_| text.to_owned())
}

/// True if a name is one of a pattern, in which `*` stands for any characters and `?` for one.
pub fn is_like(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut of) = (0, 0);
    // Behind the last `*`, and as far as that stands for the name.
    let mut last = None;
    while let Some(next) = name.get(of) {
        match (pattern.get(at), &mut last) {
            (Some(b'*'), _) => {
                at += 1;
                last = Some((at, of));
            }
            (Some(asked), _) if [b'?', *next].contains(asked) => (at, of) = (at + 1, of + 1),
            (_, Some((behind, until))) => {
                *until += 1;
                (at, of) = (*behind, *until);
            }
            (_, None) => return false,
        }
    }
    pattern[at..].iter().all(|rest| *rest == b'*')
}

/// The interface of a rule, as iptables and paths under /proc/sys take it.
fn steered_interface(text: &str) -> Result<String, Wrong> {
    let name = interface(text)?;
    let fits = name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    if !fits || matches!(name.as_str(), "lo" | "all" | "default") || name.contains(':') {
        return Err(Wrong::new(
            format!("\"{name}\" is not an interface that leads to a peer"),
            "write a name that `ip link` shows, such as \"eth0\"",
        ));
    }
    Ok(name)
}

/// The name of a user.
fn user(text: &str) -> Result<String, Wrong> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-@".contains(c);
    let body = text.strip_suffix('$').unwrap_or(text);
    if (1..=32).contains(&body.len()) && body.chars().all(fits) && !body.starts_with(['-', '.']) {
        return Ok(text.to_owned());
    }
    Err(Wrong::new(
        format!("\"{}\" is not the name of a user", text.escape_debug()),
        "for a number use uid",
    ))
}

#[cfg(test)]
mod tests;
