//! `dibsctl doctor` on hosts that something is wrong with, on purpose, and on hosts where nothing is.

use anyhow::{Result, ensure};
use netns_tests::{Node, Setup, isolated};
use serde_json::Value;

/// What it says, and whether it is content.
pub(crate) fn examined(node: &Node) -> Result<(Value, bool)> {
    let answer = node.doctor()?;
    let content = answer["ok"] == true;
    Ok((answer, content))
}

/// The checks that came out like this, each with what it is about.
fn those(answer: &Value, result: &str) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let checks = answer["checks"].as_array().into_iter().flatten();
    let such = checks.filter(|check| check["result"] == result);
    such.map(|check| (text(&check["check"]), text(&check["subject"])))
        .collect()
}

fn has(found: &[(String, String)], check: &str, subject: &str) -> bool {
    found.iter().any(|(c, s)| c == check && s == subject)
}

#[test]
fn hosts_where_all_is_well() {
    isolated(|| {
        Setup::new().run(|net| {
            for node in [&net.a, &net.b] {
                let (answer, content) = examined(node)?;
                ensure!(content, "{answer:#}");
                let fine = those(&answer, "ok");
                for path in ["eth", "wlan"] {
                    ensure!(has(&fine, "path", path), "{answer:#}");
                }
                for check in ["steering", "tun_device", "conntrack"] {
                    ensure!(has(&fine, check, ""), "{answer:#}");
                }
            }
            let fine = those(&examined(&net.a)?.0, "ok");
            ensure!(has(&fine, "session", "server"), "{fine:?}");
            ensure!(has(&fine, "udp", "wlan to server"), "{fine:?}");
            // It left nothing behind, and nothing that was there has gone.
            let talk = net.bumped()?;
            ensure!(examined(&net.a)?.1);
            talk.advance(64 << 10)?;
            talk.finish()
        })
    });
}

/// One fault after the other on the same host, each told while it lasts.
#[test]
fn hosts_with_faults() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let host = &net.a.host;
            // With what it takes to mend them: what is wrong, and what is then told of what.
            let faults = [
                (
                    "sysctl -q -w net.ipv4.conf.wlan0.rp_filter=1; \
                     ip route add 10.0.2.2/32 via 10.0.1.2",
                    "ip route del 10.0.2.2/32; sysctl -q -w net.ipv4.conf.wlan0.rp_filter=0",
                    ("failed", "rp_filter", "wlan"),
                ),
                (
                    "iptables -I INPUT -i dibs1 -j DROP",
                    "iptables -D INPUT -i dibs1 -j DROP",
                    ("failed", "firewall", "server"),
                ),
                (
                    "nft add table inet fw; \
                     nft add chain inet fw out '{ type filter hook output priority 0; }'; \
                     nft add rule inet fw out oifname eth0 udp dport 5300 drop",
                    "nft delete table inet fw",
                    ("failed", "firewall", "eth"),
                ),
                (
                    "ip link set dev wlan0 mtu 1000",
                    "ip link set dev wlan0 mtu 1500",
                    ("failed", "mtu", "wlan"),
                ),
                (
                    "iptables-nft -A INPUT -i eth9 -j DROP; iptables-legacy -A INPUT -i eth9 -j DROP",
                    "iptables-nft -D INPUT -i eth9 -j DROP; iptables-legacy -D INPUT -i eth9 -j DROP",
                    ("warning", "iptables", ""),
                ),
                (
                    "iptables -t mangle -A OUTPUT -d 10.0.9.9 -j MARK --set-mark 1",
                    "iptables -t mangle -D OUTPUT -d 10.0.9.9 -j MARK --set-mark 1",
                    ("warning", "marks", ""),
                ),
                (
                    "ip rule add priority 100 table 77",
                    "ip rule del priority 100",
                    ("warning", "routing", ""),
                ),
                (
                    "ip link set dev eth0 down",
                    "ip link set dev eth0 up",
                    ("failed", "path", "eth"),
                ),
            ];
            for (harm, mend, (result, check, subject)) in faults {
                let (before, _) = examined(&net.a)?;
                let told = those(&before, result);
                ensure!(!has(&told, check, subject), "before {harm}: {before:#}");
                host.shell(harm)?;
                let (answer, content) = examined(&net.a)?;
                let told = those(&answer, result);
                ensure!(has(&told, check, subject), "{harm}: {answer:#}");
                ensure!(content == (result != "failed"), "{harm}: {answer:#}");
                host.shell(mend)?;
            }
            Ok(())
        })
    });
}
