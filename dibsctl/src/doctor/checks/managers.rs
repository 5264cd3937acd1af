//! Whether programs that manage networks leave alone what is dibs'.

use crate::doctor::finding::Finding;
use crate::doctor::host::Managers;

const CHECK: &str = "managers";

/// By which run, and what their files say.
pub(crate) fn judge(managers: &Managers) -> Vec<Finding> {
    let runs = |name: &str| managers.running.iter().any(|known| known == name);
    let mut findings = Vec::new();
    if runs("NetworkManager") {
        let told = managers.network_manager.contains("interface-name:dibs");
        findings.push(snippet(
            told,
            "NetworkManager",
            "may reconfigure the TUNs of dibs",
            "NetworkManager/conf.d",
        ));
    }
    // The kernel keeps 15 bytes of a name.
    if runs("systemd-network") {
        let keys = ["ManageForeignRoutes", "ManageForeignRoutingPolicyRules"];
        let told = keys.iter().all(|key| is_off(&managers.networkd, key));
        findings.push(snippet(
            told,
            "systemd-networkd",
            "may delete the rules and routes of dibs",
            "systemd/networkd.conf.d",
        ));
    }
    if runs("firewalld") {
        let found = "it runs; dibsd restores what its reload flushes";
        findings.push(Finding::fine(CHECK, found).about("firewalld"));
    }
    if runs("dockerd") || runs("containerd") {
        let found = "it runs; connections of containers can be protected only if their network is in gateway";
        findings.push(Finding::fine(CHECK, found).about("docker"));
    }
    if findings.is_empty() {
        findings.push(Finding::fine(
            CHECK,
            "no network manager that doctor knows runs",
        ));
    }
    findings
}

fn snippet(told: bool, name: &str, otherwise: &str, directory: &str) -> Finding {
    let finding = match told {
        true => Finding::fine(CHECK, "it does not change what dibs set up"),
        false => Finding::warning(
            CHECK,
            format!("it runs, and {otherwise}"),
            format!(
                "install the snippet for it from configs/ as /etc/{directory}/dibs.conf, and restart it"
            ),
        ),
    };
    finding.about(name)
}

/// Whether the last line that sets a key sets it to no.
fn is_off(text: &str, key: &str) -> bool {
    let mut set = text.lines().filter_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == key).then(|| value.trim().to_ascii_lowercase())
    });
    set.next_back()
        .is_some_and(|value| ["no", "false", "0", "off"].contains(&value.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    fn outcomes(running: &[&str], network_manager: &str, networkd: &str) -> Vec<Outcome> {
        let managers = Managers {
            running: running.iter().map(|&name| name.to_owned()).collect(),
            network_manager: network_manager.to_owned(),
            networkd: networkd.to_owned(),
        };
        let findings = judge(&managers);
        findings.iter().map(|finding| finding.outcome).collect()
    }

    #[test]
    fn the_snippets_make_the_difference() {
        let nm = include_str!("../../../../configs/NetworkManager/dibs.conf");
        let networkd = include_str!("../../../../configs/networkd.conf.d/dibs.conf");
        let both = ["NetworkManager", "systemd-network"];
        assert_eq!(outcomes(&both, "", ""), [Outcome::Warning; 2]);
        assert_eq!(outcomes(&both, nm, networkd), [Outcome::Ok; 2]);
        let undone = format!("{networkd}ManageForeignRoutes=yes\n");
        assert_eq!(outcomes(&both[1..], "", &undone), [Outcome::Warning]);
        assert_eq!(
            outcomes(&["dockerd", "firewalld"], "", ""),
            [Outcome::Ok; 2]
        );
        assert_eq!(outcomes(&[], "", ""), [Outcome::Ok]);
    }
}
