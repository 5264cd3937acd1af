//! What dibs leaves in a host's kernel.

use anyhow::{Context as _, Result};
use dibs_netns::Host;

/// Firewall rules, routing rules, routes, interfaces, addresses, sysctls, and conntrack marks: everything that a daemon
/// could have changed, in a form in which equal states are equal.
///
/// # Errors
/// If one of the listing commands fails.
pub fn state(host: &Host) -> Result<Vec<String>> {
    let mut state = Vec::new();
    for list in ["iptables-save", "ip6tables-save"] {
        let listed = host.run(list)?;
        // Empty tables and the counters of chains say only that somebody looked.
        let rules = listed.lines().filter(|line| {
            let own_chain = line.starts_with(':') && line.contains(" - ");
            line.starts_with('-') || own_chain
        });
        state.extend(rules.map(|rule| format!("{list}: {rule}")));
    }
    for list in [
        "ip rule",
        "ip -6 rule",
        "ip route show table all",
        "ip -br link",
        "ip -br address",
        "sysctl -a --pattern ^net.ipv[46].(conf|ip_forward)",
    ] {
        let mut lines: Vec<String> = host
            .run(list)?
            .lines()
            .map(|line| format!("{list}: {}", lasting(line)))
            .collect();
        lines.sort();
        state.extend(lines);
    }
    // Those of iptables stay, empty.
    let tables = host.run("nft list tables")?;
    let others = |table: &&str| !table.starts_with("table ip ") && !table.starts_with("table ip6 ");
    state.extend(tables.lines().filter(others).map(str::to_owned));
    for entry in marked(host)? {
        // Without how long it stays, which is less each second, and by how many it is looked at.
        let words = entry.split_ascii_whitespace();
        let lasting =
            words.filter(|word| word.parse::<u32>().is_err() && !word.starts_with("use="));
        let lasting: Vec<&str> = lasting.collect();
        state.push(format!("conntrack: {}", lasting.join(" ")));
    }
    Ok(state)
}

/// A line of ip(8) without what the kernel changes by itself: it learns a moment later that the other end of an
/// interface is up, and what it says of the interface's routes follows.
fn lasting(line: &str) -> String {
    let words = line.split_ascii_whitespace();
    let words: Vec<&str> = words.filter(|&word| word != "linkdown").collect();
    words.join(" ")
}

/// The connections with a mark, as conntrack(8) lists them.
///
/// # Errors
/// If it cannot list them.
pub fn marked(host: &Host) -> Result<Vec<String>> {
    let mut marked = Vec::new();
    for family in ["ipv4", "ipv6"] {
        let listed = host.run(&format!("conntrack -L -f {family}"))?;
        let lines = listed.lines().filter(|line| {
            let mark = line.split(' ').find_map(|word| word.strip_prefix("mark="));
            mark.is_some_and(|mark| mark != "0")
        });
        marked.extend(lines.map(str::to_owned));
    }
    Ok(marked)
}

/// Segments that the host's TCP dropped for their time stamps, or whose echo it did not believe.
///
/// # Errors
/// If the kernel does not count them.
pub fn too_old(host: &Host) -> Result<u64> {
    Ok(counted(host, "PAWSEstab")? + counted(host, "TSEcrRejected")?)
}

/// One of the counters of the host's TCP (`TcpExt` in /proc/net/netstat).
///
/// # Errors
/// If there is none of this name.
pub fn counted(host: &Host, name: &str) -> Result<u64> {
    let counters = host.in_ns(|| std::fs::read_to_string("/proc/thread-self/net/netstat"))?;
    let mut lines = counters.lines();
    let (names, values) = lines.next().zip(lines.next()).context("no counters")?;
    let mut counted = names.split(' ').zip(values.split(' '));
    let found = counted.find(|(of, _)| *of == name);
    let (_, count) = found.with_context(|| format!("no {name}: {names}"))?;
    Ok(count.parse()?)
}
