//! Filter rules as far as a doctor understands them, and the one that drops a packet for certain.
//!
//! Other conditions of a rule may hold or not: a rule with such a condition is never named.

use std::net::IpAddr;

use ipnet::IpNet;

/// A packet that has to get through.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// Whether it comes in; else it goes out.
    pub(crate) inbound: bool,
    /// True if it comes from another host and goes on to another.
    pub(crate) passes: bool,
    /// Interface by which it comes or goes.
    pub(crate) interface: String,
    /// The other interface of one that passes, if it is known.
    pub(crate) other: Option<String>,
    /// "tcp" or "udp".
    pub(crate) protocol: &'static str,
    /// Whose it is.
    pub(crate) source: Option<IpAddr>,
    /// For whom it is.
    pub(crate) destination: Option<IpAddr>,
    /// Destination port.
    pub(crate) dport: Option<u16>,
    /// What conntrack calls its connection: "new" or "established".
    pub(crate) state: &'static str,
}

/// One thing that a rule asks of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    /// Whether it has to be otherwise.
    pub(crate) negated: bool,
    /// What.
    pub(crate) what: What,
}

/// See [`Condition`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Comes in by one of these; a `+` or `*` at the end stands for anything.
    In(Vec<String>),
    /// Goes out by one of these.
    Out(Vec<String>),
    /// One of these protocols.
    Protocol(Vec<String>),
    /// From one of these.
    Source(Vec<IpNet>),
    /// To one of these.
    Destination(Vec<IpNet>),
    /// To a port of these spans.
    Dport(Vec<(u16, u16)>),
    /// For an address of one of these types, in capitals.
    AddressType(Vec<String>),
    /// Of a connection in one of these states, in small letters.
    State(Vec<String>),
    /// Something that is not understood here.
    Unknown,
}

/// What a rule does with packets that it matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Lets it pass this base chain.
    Accept,
    /// Drops or rejects it.
    Drop,
    /// Goes on in the chain that called.
    Return,
    /// Goes on in another chain.
    Jump(String),
    /// Nothing that decides.
    Nothing,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// As its program shows it.
    pub(crate) text: String,
    /// All have to hold.
    pub(crate) conditions: Vec<Condition>,
    /// What then happens.
    pub(crate) target: Target,
}

/// Rules one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chain {
    /// Its table, to which jumps are confined, and its name.
    pub(crate) name: (String, String),
    /// Where the kernel calls it ("prerouting", "input", ...), if it does.
    pub(crate) hook: Option<String>,
    /// What becomes of packets at its end, if the kernel calls it.
    pub(crate) drops: bool,
    /// In order.
    pub(crate) rules: Vec<Rule>,
}

/// Longer than any chain of jumps that the kernel takes.
const DEPTH: usize = 32;

/// Rule, or policy, that drops a packet for certain in a chain that the kernel calls for it.
pub(crate) fn dropped_by(chains: &[Chain], packet: &Packet) -> Option<String> {
    let hooks = match (packet.inbound, packet.passes) {
        (true, true) => ["prerouting", "forward"],
        (true, false) => ["prerouting", "input"],
        (false, true) => ["forward", "postrouting"],
        (false, false) => ["output", "postrouting"],
    };
    let is_called =
        |chain: &&Chain| { chain.hook.as_ref() }.is_some_and(|hook| hooks.contains(&hook.as_str()));
    let mut called = chains.iter().filter(is_called);
    called.find_map(|chain| match through(chains, packet, chain, DEPTH) {
        End::Dropped(text) => Some(text),
        End::Accepted => None,
        End::Fell => { chain.drops }.then(|| format!("the policy of {}", chain.name.1)),
    })
}

/// How a chain ends.
enum End {
    Accepted,
    Dropped(String),
    Fell,
}

/// End of a packet in a chain. What a rule does that may match is left out if it drops; else the packet is taken to pass.
fn through(chains: &[Chain], packet: &Packet, chain: &Chain, depth: usize) -> End {
    for rule in &chain.rules {
        let Some(certain) = packet.matches(rule) else {
            continue;
        };
        let end = match &rule.target {
            Target::Nothing => continue,
            Target::Accept => End::Accepted,
            Target::Drop => End::Dropped(rule.text.clone()),
            Target::Return => End::Fell,
            Target::Jump(to) => {
                let name = (&chain.name.0, to);
                let to = chains.iter().find(|c| (&c.name.0, &c.name.1) == name);
                match to.filter(|_| depth > 0) {
                    Some(to) => match through(chains, packet, to, depth - 1) {
                        End::Fell => continue,
                        end => end,
                    },
                    None => continue,
                }
            }
        };
        match end {
            end if certain => return end,
            End::Dropped(_) => {}
            End::Accepted | End::Fell => return End::Accepted,
        }
    }
    End::Fell
}

impl Packet {
    /// Whether all conditions hold for certain, or may; `None` if one does not.
    fn matches(&self, rule: &Rule) -> Option<bool> {
        let mut certain = true;
        for condition in &rule.conditions {
            match self.holds(&condition.what) {
                Some(holds) if holds == condition.negated => return None,
                Some(_) => {}
                None => certain = false,
            }
        }
        Some(certain)
    }

    fn holds(&self, what: &What) -> Option<bool> {
        let packet = self;
        let named = |names: &[String], inbound| {
            let interface = match (packet.inbound == inbound, packet.passes) {
                (true, _) => &packet.interface,
                (false, true) => packet.other.as_ref()?,
                (false, false) => return Some(false),
            };
            let fits = |name: &String| match name.strip_suffix(['+', '*']) {
                Some(start) => interface.starts_with(start),
                None => interface == name,
            };
            Some(names.iter().any(fits))
        };
        let within = |nets: &[IpNet], address: Option<IpAddr>| {
            address.map(|address| nets.iter().any(|net| net.contains(&address)))
        };
        match what {
            What::In(names) => named(names, true),
            What::Out(names) => named(names, false),
            What::Protocol(names) => Some(names.iter().any(|name| name == packet.protocol)),
            What::Source(nets) => within(nets, packet.source),
            What::Destination(nets) => within(nets, packet.destination),
            What::Dport(spans) => packet
                .dport
                .map(|port| spans.iter().any(|(from, to)| (*from..=*to).contains(&port))),
            // What is judged comes to this host.
            What::AddressType(types) => {
                { packet.inbound && !packet.passes }.then(|| types.iter().any(|of| of == "LOCAL"))
            }
            What::State(states) => Some(states.iter().any(|state| state == packet.state)),
            What::Unknown => None,
        }
    }
}
