//! What must hold of the daemons, and how they look when it does not.

use dibs_core::counters::Counter;

use super::World;
use crate::history::name;

impl World {
    pub(super) fn check_bounds(&self, host: usize) -> Result<(), String> {
        let Some(node) = &self.hosts[host].node else {
            return Ok(());
        };
        for peer in node.peers(self.now) {
            // What each end says in its hello that it can hold.
            if peer.held > 32 << 20 || peer.unacknowledged > (32 << 20) + (64 << 10) {
                return Err(format!("bounds exceeded at {}: {peer:?}", name(host)));
            }
        }
        for counter in [
            Counter::CrcMismatch,
            Counter::PeerContradiction,
            Counter::AckRefused,
            Counter::FrameMalformed,
            Counter::InnerAddress,
            Counter::TunMalformed,
            Counter::TunNoPeer,
            Counter::KeysExhausted,
        ] {
            if node.counters().get(counter) > 0 {
                return Err(format!(
                    "{} between honest ends, at {}",
                    counter.name(),
                    name(host)
                ));
            }
        }
        Ok(())
    }

    /// Everything has been delivered and some time has passed: nothing may be left.
    pub(super) fn check_rest(&self, datagrams: u64) -> Result<(), String> {
        let paths = self.links.len() as u64;
        if datagrams > 200 * paths {
            return Err(format!("{datagrams} datagrams in 10 s of silence"));
        }
        for (host, h) in self.hosts.iter().enumerate() {
            let Some(node) = &h.node else { continue };
            for peer in node.peers(self.now) {
                if peer.unacknowledged > 0 {
                    return Err(format!(
                        "{} still waits for the acknowledgement of {} bytes",
                        name(host),
                        peer.unacknowledged
                    ));
                }
                if peer.held > 0 {
                    return Err(format!("{} still holds {} bytes", name(host), peer.held));
                }
            }
        }
        if let Some(late) = self.conns.iter().find(|c| !c.is_done()) {
            return Err(format!("{:?} is not done", late.ports));
        }
        Ok(())
    }

    pub(super) fn describe(&self) -> String {
        let [a, b] = &self.hosts;
        let mut text = String::new();
        for (number, conn) in self.conns.iter().enumerate() {
            let done = if conn.is_done() { "done" } else { "open" };
            text += &format!(
                "conn {number} {done} {}\n",
                conn.describe([&a.kernel, &b.kernel])
            );
        }
        for (host, h) in self.hosts.iter().enumerate() {
            text += &format!("{}: ", name(host));
            let Some(node) = &h.node else {
                text += "no daemon\n";
                continue;
            };
            text += &format!("{:?}\n", node.peers(self.now));
            for path in node.paths() {
                text += &format!("  {path:?}\n");
            }
            for conn in node.conns() {
                text += &format!("  {conn:?}\n");
            }
            let counts = node.counters().iter().filter(|(_, n)| *n > 0);
            for (counter, n) in counts {
                text += &format!("  {counter} {n}");
            }
            text += "\n";
        }
        text
    }
}
