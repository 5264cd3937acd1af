//! NAT of others: who translates the addresses of what this host sends, and of what is sent to it.

use ipnet::IpNet;
use std::net::SocketAddr;

use crate::Error;
use crate::runner::{Command, CommandRunner, System};

/// Targets that change a packet's source.
const TARGETS: [&str; 3] = ["MASQUERADE", "SNAT", "NETMAP"];
/// Targets that change a packet's destination.
const LEADING: [&str; 2] = ["DNAT", "REDIRECT"];
/// Each sees only the rules made with it.
const PROGRAMS: [[&str; 2]; 2] = [
    ["iptables-nft-save", "iptables-legacy-save"],
    ["ip6tables-nft-save", "ip6tables-legacy-save"],
];

/// The first rule of iptables that may translate the source of a connection, as it was written; `None`
/// where nftables or a chain that jumps elsewhere does.
pub async fn rule_for(local: SocketAddr, remote: SocketAddr) -> Result<Option<String>, Error> {
    let tables = saved(remote.is_ipv6()).await?;
    let mut found = tables.iter().filter_map(|saved| find(saved, local, remote));
    Ok(found.next().map(str::to_owned))
}

/// Rules of iptables that give what is sent to this host another destination, as they were written.
pub async fn leading() -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    for v6 in [false, true] {
        for saved in saved(v6).await? {
            found.extend(leading_in(&saved).map(str::to_owned));
        }
    }
    Ok(found)
}

async fn saved(v6: bool) -> Result<Vec<String>, Error> {
    let mut tables = Vec::new();
    for program in PROGRAMS[usize::from(v6)] {
        match System.run(&Command::new(program, &[], "")).await {
            Ok(saved) => tables.push(saved),
            Err(Error::NotInstalled(_) | Error::Command { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(tables)
}

fn leading_in(saved: &str) -> impl Iterator<Item = &str> {
    let mut table = "";
    saved.lines().filter(move |line| {
        table = line.strip_prefix('*').unwrap_or(table);
        let target = line.split(" -j ").nth(1).unwrap_or_default();
        let target = target.split(' ').next().unwrap_or_default();
        table == "nat" && LEADING.contains(&target)
    })
}

fn find(saved: &str, local: SocketAddr, remote: SocketAddr) -> Option<&str> {
    let mut table = "";
    for line in saved.lines() {
        table = line.strip_prefix('*').unwrap_or(table);
        let words: Vec<&str> = line.split(' ').collect();
        let value = |key: &str| {
            let at = words.iter().position(|word| *word == key)?;
            let negated = at > 0 && words[at - 1] == "!";
            Some((*words.get(at + 1)?, negated))
        };
        let may_hold = |key, address: SocketAddr| match value(key) {
            Some((prefix, negated)) => match prefix.parse::<IpNet>() {
                Ok(prefix) => prefix.contains(&address.ip()) != negated,
                Err(_) => true,
            },
            None => true,
        };
        let translates = value("-j").is_some_and(|(target, _)| TARGETS.contains(&target));
        if table == "nat" && translates && may_hold("-s", local) && may_hold("-d", remote) {
            return Some(line);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = "\
*mangle
-A POSTROUTING -j MASQUERADE
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING ! -d 10.0.0.0/8 -o eth0 -j MASQUERADE
-A POSTROUTING -d 10.0.1.0/24 -o eth0 -j SNAT --to-source 10.0.1.9
COMMIT
";

    #[test]
    fn the_rule_that_fits_is_named() {
        let rule = |local: &str, remote: &str| {
            find(SAVED, local.parse().unwrap(), remote.parse().unwrap())
        };
        assert_eq!(
            rule("10.0.1.1:40000", "10.0.1.2:80"),
            Some("-A POSTROUTING -d 10.0.1.0/24 -o eth0 -j SNAT --to-source 10.0.1.9")
        );
        assert_eq!(
            rule("172.17.0.2:40000", "10.0.1.2:80"),
            Some("-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE")
        );
        assert_eq!(rule("10.0.1.1:40000", "10.3.1.2:80"), None);
        let leads = "-A DOCKER ! -i docker0 -p tcp -m tcp --dport 80 -j DNAT --to-destination 172.17.0.2:80";
        let saved = format!("*nat\n-A DOCKER -i docker0 -j RETURN\n{leads}\n");
        assert_eq!(leading_in(&saved).collect::<Vec<_>>(), [leads]);
    }
}
