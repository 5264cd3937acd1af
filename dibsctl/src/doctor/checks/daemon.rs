//! What a running daemon knows to be wrong.

use dibs_control::{BackstopState, ClientError, PathState, PeerState, Status};

use crate::doctor::finding::Finding;
use crate::units::micros;

const CHECK: &str = "daemon";

/// By its status.
pub(crate) fn judge(status: &Result<Status, ClientError>) -> Vec<Finding> {
    let status = match status {
        Ok(status) => status,
        Err(error @ ClientError::NotRunning { .. }) => {
            let advice = "start it, so that sessions and paths can be checked too";
            return vec![Finding::skipped(CHECK, error.to_string(), advice)];
        }
        Err(error @ ClientError::NoAccess { .. }) => {
            let advice = "run doctor with sudo, or join the group dibs";
            return vec![Finding::skipped(CHECK, error.to_string(), advice)];
        }
        Err(error) => {
            let advice = "see its log (journalctl -u dibsd), and restart it";
            return vec![Finding::failed(CHECK, error.to_string(), advice)];
        }
    };
    let mut findings = vec![Finding::fine(
        CHECK,
        format!("dibsd {} runs, pid {}", status.version, status.pid),
    )];
    findings.extend({ status.warnings.iter() }.map(|warning| {
        let advice = "see docs/steering.md and docs/threat-model.md";
        Finding::warning(CHECK, warning, advice)
    }));
    let why = status.backstop.reason.clone().unwrap_or_default();
    match status.backstop.state {
        BackstopState::Failed => findings.push(Finding::failed(
            CHECK,
            format!("the kill switch in nftables failed: {why}"),
            "remove the table inet dibs that another program made in nftables",
        )),
        BackstopState::Missing => findings.push(Finding::warning(
            CHECK,
            "there is no kill switch, because this kernel has no nftables",
            "load nf_tables",
        )),
        _ => {}
    }
    findings.extend(status.peers.iter().map(|peer| {
        let why = peer.reason.clone().unwrap_or_default();
        let finding = match (peer.state, &peer.reason) {
            (PeerState::Established, None) => Finding::fine("session", "established"),
            (PeerState::Established, Some(why)) => {
                let advice = "see docs/nat.md, \"Addresses\"";
                Finding::warning("session", why, advice)
            }
            _ => Finding::failed(
                "session",
                format!("there is no session: {why}"),
                "check that dibsd runs at both ends with each other's public keys, and that firewalls let UDP through",
            ),
        };
        finding.about(&peer.name)
    }));
    findings.extend({ status.peers.iter() }.flat_map(|peer| {
        peer.endpoints.iter().filter_map(|endpoint| {
            let fault = endpoint.fault.as_deref()?;
            let advice = "check the name, and that the resolver answers (getent ahosts NAME)";
            let finding = Finding::warning("endpoint", fault, advice);
            Some(finding.about(format!("{} to {}", endpoint.path, peer.name)))
        })
    }));
    findings.extend(status.paths.iter().map(|path| {
        let why = path.reason.clone().unwrap_or_default();
        let finding = match (path.state, path.srtt_us) {
            (PathState::Up, rtt) => {
                let rtt = rtt.map_or_else(|| "not known yet".to_owned(), micros);
                Finding::fine("udp", format!("UDP gets through, round trip {rtt}"))
            }
            _ => Finding::failed(
                "udp",
                format!("UDP does not get through: {why}"),
                "check the interface of this path, firewalls on the way, and the peer's end",
            ),
        };
        finding.about(format!("{} to {}", path.name, path.peer))
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn one_that_does_not_run_is_no_fault() {
        let judged = |error| judge(&Err(error))[0].outcome;
        let socket = || "/s".into();
        assert_eq!(judged(ClientError::NotRunning(socket())), Outcome::Skipped);
        assert_eq!(judged(ClientError::NoAccess(socket())), Outcome::Skipped);
        assert_eq!(judged(ClientError::Closed(socket())), Outcome::Failed);
    }
}
