//! Ports of a host whose kernel does not answer, or refuses, what a peer sends there by a bump: which these are, and who knows of it.

use std::collections::BTreeSet;

use dibs_settings::BumpId;

/// A port, and the bump by which calls to it come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// The bump, whose device the calls come out of.
    pub bump: BumpId,
    /// The port.
    pub port: u16,
    /// The kernel answers with RST.
    pub refuses: bool,
}

/// Ports that fell silent, and ports that answer again or are called no more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Silent from now on.
    pub silent: Vec<Port>,
    /// Not any more.
    pub ended: Vec<Port>,
}

impl Change {
    fn between(before: &BTreeSet<Port>, now: &BTreeSet<Port>) -> Self {
        Self {
            silent: now.difference(before).copied().collect(),
            ended: before.difference(now).copied().collect(),
        }
    }
}

/// Ports of this host that do not answer a peer. Inputs are [`handle_report`](Self::handle_report), then
/// [`settle`](Self::settle); what the peer is to be told comes from [`poll_telling`](Self::poll_telling).
#[derive(Clone, Debug, Default)]
pub struct Here {
    /// As the node says.
    reported: BTreeSet<Port>,
    /// Ports of them where a listener had no room when they were reported.
    busy: BTreeSet<Port>,
    /// The others.
    silent: BTreeSet<Port>,
    /// Ports that the peer knows of.
    told: BTreeSet<Port>,
    /// The peer is being told.
    telling: bool,
}

impl Here {
    /// All ports that are silent now, as the node says.
    pub fn handle_report(&mut self, ports: impl Iterator<Item = Port>) {
        self.reported = ports.collect();
    }

    /// True if one is reported of which nobody has looked yet why it is silent.
    pub fn has_news(&self) -> bool {
        let mut reported = self.reported.iter();
        reported.any(|port| !self.silent.contains(port) && !self.busy.contains(port))
    }

    /// Takes over what was reported. A kernel drops calls, too, for a program that does not take them: `is_busy` says
    /// whether one listens there that has no room.
    pub fn settle(&mut self, is_busy: impl Fn(u16) -> bool) -> Change {
        let Self { silent, busy, .. } = self;
        let has_no_room = |port: &&Port| {
            let is_news = !port.refuses && !silent.contains(port);
            busy.contains(port) || is_news && is_busy(port.port)
        };
        let (full, rest) = self
            .reported
            .iter()
            .partition::<BTreeSet<_>, _>(has_no_room);
        let change = Change::between(&self.silent, &rest);
        (self.busy, self.silent) = (full, rest);
        change
    }

    /// All that are silent.
    pub fn ports(&self) -> impl Iterator<Item = Port> {
        self.silent.iter().copied()
    }

    /// The peer restarted, and knows nothing of them.
    pub fn handle_restart(&mut self) {
        self.told.clear();
    }

    /// True if the peer is to be told, and nobody does so yet: whoever asks does from now on.
    pub fn begin_telling(&mut self) -> bool {
        let begins = !self.telling && self.told != self.silent;
        self.telling |= begins;
        begins
    }

    /// All ports to tell the peer of; none where it knows, and whoever told it has done.
    pub fn poll_telling(&mut self) -> Option<Vec<Port>> {
        self.telling = self.told != self.silent;
        self.telling.then(|| self.ports().collect())
    }

    /// The peer was told of these.
    pub fn handle_told(&mut self, ports: Vec<Port>) {
        self.told = ports.into_iter().collect();
    }

    /// The peer cannot be told: it is in its next session.
    pub fn give_up(&mut self) {
        self.telling = false;
    }
}

/// Ports of a peer's host that do not answer this one, as the peer says.
#[derive(Clone, Debug, Default)]
pub struct There {
    sequence: u64,
    ports: BTreeSet<Port>,
}

impl There {
    /// The peer says which are silent now. What comes late changes nothing.
    pub fn handle_message(&mut self, sequence: u64, ports: Vec<Port>) -> Change {
        if sequence <= self.sequence {
            return Change::default();
        }
        self.sequence = sequence;
        let ports = ports.into_iter().collect();
        let change = Change::between(&self.ports, &ports);
        self.ports = ports;
        change
    }

    /// The peer restarted, and says all anew.
    pub fn handle_restart(&mut self) {
        *self = Self::default();
    }

    /// All that are silent.
    pub fn ports(&self) -> impl Iterator<Item = Port> {
        self.ports.iter().copied()
    }

    /// True if this one is, and sends nothing.
    pub fn contains(&self, bump: BumpId, port: u16) -> bool {
        self.ports.contains(&Port {
            bump,
            port,
            refuses: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(port: u16) -> Port {
        let bump = BumpId::new(3).unwrap();
        Port {
            bump,
            port,
            refuses: false,
        }
    }

    fn ports<const N: usize>(numbers: [u16; N]) -> Vec<Port> {
        numbers.map(port).to_vec()
    }

    fn change<const N: usize, const M: usize>(silent: [u16; N], ended: [u16; M]) -> Change {
        Change {
            silent: ports(silent),
            ended: ports(ended),
        }
    }

    fn report<const N: usize>(here: &mut Here, numbers: [u16; N]) {
        here.handle_report(ports(numbers).into_iter());
    }

    #[test]
    fn a_listener_without_room_is_no_firewall() {
        let mut here = Here::default();
        report(&mut here, [22, 80]);
        assert!(here.has_news());
        assert_eq!(here.settle(|port| port == 80), change([22], []));
        assert!(!here.has_news());
        // Its program has taken some since, and that is no news; nor that the other one is full by now.
        assert_eq!(here.settle(|port| port == 22), change([], []));
        report(&mut here, [22]);
        assert_eq!(here.settle(|_| false), change([], []));
        report(&mut here, [22, 80]);
        assert!(here.has_news());
        assert_eq!(here.settle(|_| false), change([80], []));
        report(&mut here, []);
        assert_eq!(here.settle(|_| false), change([], [22, 80]));
    }

    #[test]
    fn a_peer_is_told_once_of_each_change_by_one_teller() {
        let mut here = Here::default();
        assert!(!here.begin_telling());
        report(&mut here, [22]);
        here.settle(|_| false);
        assert!(here.begin_telling() && !here.begin_telling());
        assert_eq!(here.poll_telling(), Some(ports([22])));
        // It changes while the peer is told.
        report(&mut here, [22, 80]);
        here.settle(|_| false);
        here.handle_told(ports([22]));
        assert!(!here.begin_telling());
        assert_eq!(here.poll_telling(), Some(ports([22, 80])));
        here.handle_told(ports([22, 80]));
        assert_eq!(here.poll_telling(), None);
        assert!(!here.begin_telling());
        here.handle_restart();
        assert!(here.begin_telling());
        here.give_up();
        assert!(here.begin_telling());
    }

    #[test]
    fn the_latest_word_of_a_peer_stands() {
        let mut there = There::default();
        assert_eq!(
            there.handle_message(2, ports([22, 80])),
            change([22, 80], [])
        );
        assert_eq!(there.handle_message(1, ports([])), change([], []));
        assert_eq!(
            there.handle_message(3, ports([80, 443])),
            change([443], [22])
        );
        let at = |number| there.contains(port(number).bump, number);
        assert!(at(443) && !at(22));
        there.handle_restart();
        assert_eq!(there.ports().count(), 0);
        assert_eq!(there.handle_message(1, ports([80])), change([80], []));
    }
}
