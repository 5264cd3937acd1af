//! Schedulers that the user wants for some connections only.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use dibs_settings::Scheduler;
use dibs_wire::FlowKey;
use ipnet::IpNet;

/// Connections whose new data is shared out by a scheduler of their own, whichever bump they are on: those that
/// match in everything that is named. An empty list names nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowScheduler {
    /// How it is shared out.
    pub scheduler: Scheduler,
    /// Addresses that this host sends from.
    pub local: Vec<IpNet>,
    /// Addresses that it sends to.
    pub remote: Vec<IpNet>,
    /// Ports that it sends from.
    pub local_ports: Vec<RangeInclusive<u16>>,
    /// Ports that it sends to.
    pub remote_ports: Vec<RangeInclusive<u16>>,
}

impl FlowScheduler {
    /// All connections.
    pub const fn all(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            local: Vec::new(),
            remote: Vec::new(),
            local_ports: Vec::new(),
            remote_ports: Vec::new(),
        }
    }

    /// True if a connection of these ends, as the local host sends, is one of them.
    pub fn selects(&self, tuple: &FlowKey) -> bool {
        let lies = |nets: &[IpNet], addr: IpAddr| {
            nets.is_empty() || nets.iter().any(|net| net.contains(&addr))
        };
        let fits = |ports: &[RangeInclusive<u16>], port: u16| {
            ports.is_empty() || ports.iter().any(|range| range.contains(&port))
        };
        lies(&self.local, tuple.src)
            && lies(&self.remote, tuple.dst)
            && fits(&self.local_ports, tuple.sport)
            && fits(&self.remote_ports, tuple.dport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_matches_in_everything_that_is_named() {
        let net = |addr: &str, len| vec![IpNet::new(addr.parse().unwrap(), len).unwrap()];
        let tuple = FlowKey::tcp(([10, 0, 1, 1], 40_000), ([10, 0, 1, 2], 22));
        let all = || FlowScheduler::all(Scheduler::Redundant);
        let fitting = FlowScheduler {
            local: net("10.0.1.1", 32),
            remote: [net("fd00::", 8), net("10.0.0.0", 8)].concat(),
            local_ports: vec![7..=7, 30_000..=40_000],
            remote_ports: vec![22..=22],
            ..all()
        };
        assert!(all().selects(&tuple) && fitting.selects(&tuple));
        assert!(!fitting.selects(&tuple.reversed()));
        for other in [
            FlowScheduler {
                local: net("10.0.1.2", 32),
                ..fitting.clone()
            },
            FlowScheduler {
                remote: net("fd00::", 8),
                ..fitting.clone()
            },
            FlowScheduler {
                local_ports: vec![7..=7, 40_001..=u16::MAX],
                ..fitting.clone()
            },
            FlowScheduler {
                remote_ports: vec![23..=23],
                ..fitting
            },
        ] {
            assert!(!other.selects(&tuple), "{other:?}");
        }
    }
}
