//! What `nft --json list ruleset` prints, as [rules](super::rules).

use serde_json::Value;

use super::rules::{Chain, Condition, Rule, Target, What};

/// The backstop of dibs.
const OURS: &str = "dibs";

/// The chains, those of the least priority first. Left out are tables that iptables keeps, whose rules it
/// shows better.
pub(crate) fn parse(ruleset: &Value) -> Vec<Chain> {
    let entries = ruleset["nftables"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let mut chains: Vec<(i64, Chain)> = Vec::new();
    for entry in entries {
        if let Some(chain) = entry.get("chain") {
            let hook = chain["hook"].as_str();
            let found = Chain {
                name: (table(chain), text(&chain["name"])),
                hook: hook.map(str::to_owned),
                drops: chain["policy"] == "drop",
                rules: Vec::new(),
            };
            chains.push((chain["prio"].as_i64().unwrap_or(0), found));
        } else if let Some(rule) = entry.get("rule") {
            let name = (table(rule), text(&rule["chain"]));
            if let Some((_, chain)) = chains.iter_mut().find(|(_, chain)| chain.name == name) {
                chain.rules.extend(rules(rule, &name));
            }
        }
    }
    chains.retain(|(_, chain)| !is_left_out(&chain.name.0));
    chains.sort_by_key(|(priority, _)| *priority);
    chains.into_iter().map(|(_, chain)| chain).collect()
}

fn is_left_out(table: &str) -> bool {
    let Some((family, name)) = table.split_once(' ') else {
        return true;
    };
    let of_iptables = ["raw", "mangle", "nat", "filter", "security"];
    match family {
        "ip" | "ip6" => of_iptables.contains(&name),
        "inet" => name == OURS,
        // Neither IP nor of this host's own.
        _ => true,
    }
}

fn table(of: &Value) -> String {
    format!("{} {}", text(&of["family"]), text(&of["table"]))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A rule; one that decides by a map of states is one for each of them.
fn rules(rule: &Value, (table, chain): &(String, String)) -> Vec<Rule> {
    let said = format!("rule {} of chain {chain} in table {table}", rule["handle"]);
    let mut conditions = match table.split_once(' ') {
        Some(("ip", _)) => vec![family(false)],
        Some(("ip6", _)) => vec![family(true)],
        _ => Vec::new(),
    };
    let mut made = Vec::new();
    for statement in rule["expr"].as_array().into_iter().flatten() {
        let Some((key, value)) = statement
            .as_object()
            .and_then(|object| object.iter().next())
        else {
            continue;
        };
        let mut finish = |conditions: &[Condition], target| {
            made.push(Rule {
                text: said.clone(),
                conditions: conditions.to_vec(),
                target,
            });
        };
        match key.as_str() {
            "match" => conditions.push(condition(value)),
            "limit" | "xt" => conditions.push(unknown()),
            "vmap" => {
                let of_state = value["key"]["ct"]["key"] == "state";
                let elements = value["data"]["set"].as_array();
                for element in elements.into_iter().flatten() {
                    let wanted = match of_state {
                        true => What::State(vec![text(&element[0])]),
                        false => What::Unknown,
                    };
                    let mut conditions = conditions.clone();
                    conditions.push(Condition {
                        negated: false,
                        what: wanted,
                    });
                    if let Some(target) = target(&element[1]) {
                        finish(&conditions, target);
                    }
                }
            }
            _ => {
                if let Some(target) = target(statement) {
                    finish(&conditions, target);
                }
            }
        }
    }
    made
}

/// A table of one family sees only that.
fn family(v6: bool) -> Condition {
    let all = if v6 { "::/0" } else { "0.0.0.0/0" };
    let all = all.parse().expect("a prefix");
    Condition {
        negated: false,
        what: What::Source(vec![all]),
    }
}

fn unknown() -> Condition {
    Condition {
        negated: false,
        what: What::Unknown,
    }
}

fn target(statement: &Value) -> Option<Target> {
    let (key, value) = statement.as_object()?.iter().next()?;
    match key.as_str() {
        "accept" => Some(Target::Accept),
        "drop" | "reject" => Some(Target::Drop),
        "return" => Some(Target::Return),
        "jump" | "goto" => Some(Target::Jump(text(&value["target"]))),
        _ => None,
    }
}

fn condition(of: &Value) -> Condition {
    let negated = of["op"] == "!=";
    let (left, right) = (&of["left"], &of["right"]);
    let strings = || -> Option<Vec<String>> {
        let string = |value: &Value| value.as_str().map(str::to_owned);
        values(right).into_iter().map(string).collect()
    };
    let meta = left["meta"]["key"].as_str();
    let payload = (&left["payload"]["protocol"], &left["payload"]["field"]);
    let what = match (meta, payload) {
        (Some("iifname" | "iif"), _) => strings().map(What::In),
        (Some("oifname" | "oif"), _) => strings().map(What::Out),
        (Some("l4proto"), _) => strings().map(What::Protocol),
        (None, (protocol, field)) if protocol == "ip" || protocol == "ip6" => {
            match field.as_str() {
                Some("saddr") => nets(right).map(What::Source),
                Some("daddr") => nets(right).map(What::Destination),
                Some("protocol") => strings().map(What::Protocol),
                _ => None,
            }
        }
        (None, (_, field)) if field == "dport" => spans(right).map(What::Dport),
        // What comes out of a TUN has no status: it is not translated.
        _ if left["ct"]["key"] == "state" || left["ct"]["key"] == "status" => {
            strings().map(What::State)
        }
        _ => None,
    };
    Condition {
        negated,
        what: what.unwrap_or(What::Unknown),
    }
}

/// One value, or those of a set.
fn values(right: &Value) -> Vec<&Value> {
    let set = right.get("set").unwrap_or(right);
    match set.as_array() {
        Some(list) => list.iter().collect(),
        None => vec![set],
    }
}

fn nets(right: &Value) -> Option<Vec<ipnet::IpNet>> {
    let net = |value: &Value| match (value.as_str(), value.get("prefix")) {
        (Some(text), _) => text.parse::<std::net::IpAddr>().ok().map(Into::into),
        (None, Some(prefix)) => {
            let length = prefix["len"].as_u64()?;
            format!("{}/{length}", prefix["addr"].as_str()?)
                .parse()
                .ok()
        }
        _ => None,
    };
    values(right).into_iter().map(net).collect()
}

fn spans(right: &Value) -> Option<Vec<(u16, u16)>> {
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    let span = |value: &Value| match value.get("range") {
        Some(range) => Some((port(&range[0])?, port(&range[1])?)),
        None => port(value).map(|port| (port, port)),
    };
    values(right).into_iter().map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::rules::{Packet, dropped_by};
    use serde_json::json;

    fn answer(table: &str, policy: &str, exprs: &[Value]) -> Option<String> {
        let mut entries = vec![
            json!({"chain": {"family": "inet", "table": table, "name": "in",
            "type": "filter", "hook": "input", "prio": 0, "policy": policy}}),
        ];
        entries.extend(exprs.iter().map(|expr| {
            json!({"rule": {"family": "inet", "table": table, "chain": "in", "handle": 7, "expr": expr}})
        }));
        let packet = Packet {
            inbound: true,
            passes: false,
            interface: "dibs1".to_owned(),
            other: None,
            protocol: "tcp",
            source: Some("10.0.1.2".parse().unwrap()),
            destination: None,
            dport: Some(22),
            state: "established",
        };
        dropped_by(&parse(&json!({ "nftables": entries })), &packet)
    }

    fn on(left: Value, right: Value) -> Value {
        json!({"match": {"op": "==", "left": left, "right": right}})
    }

    #[test]
    fn a_closed_firewall_lets_through_what_it_knows() {
        let established = on(
            json!({"ct": {"key": "state"}}),
            json!(["established", "related"]),
        );
        let rule = json!([established, {"accept": null}]);
        assert_eq!(answer("fw", "drop", &[rule]), None);
        let map = json!({"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set":
            [["invalid", {"drop": null}], ["established", {"accept": null}]]}}});
        assert_eq!(answer("fw", "drop", &[json!([map])]), None);
        assert_eq!(
            answer("fw", "drop", &[]),
            Some("the policy of in".to_owned())
        );
    }

    #[test]
    fn interfaces_addresses_and_ports_are_understood() {
        let drop = |condition: Value| answer("fw", "accept", &[json!([condition, {"drop": null}])]);
        let dropped = Some("rule 7 of chain in in table inet fw".to_owned());
        let iif = || json!({"meta": {"key": "iifname"}});
        assert_eq!(drop(on(iif(), json!("dibs1"))), dropped);
        assert_eq!(drop(on(iif(), json!({"set": ["eth0", "dibs*"]}))), dropped);
        assert_eq!(drop(on(iif(), json!("eth0"))), None);
        let saddr = json!({"payload": {"protocol": "ip", "field": "saddr"}});
        let net = json!({"prefix": {"addr": "10.0.0.0", "len": 8}});
        assert_eq!(drop(on(saddr, net)), dropped);
        let dport = json!({"payload": {"protocol": "tcp", "field": "dport"}});
        assert_eq!(drop(on(dport.clone(), json!({"range": [20, 30]}))), dropped);
        assert_eq!(drop(on(dport, json!(80))), None);
        let fib = json!({"fib": {"result": "oif", "flags": ["saddr", "iif"]}});
        assert_eq!(drop(on(fib, json!(false))), None);
    }

    #[test]
    fn our_own_table_is_not_judged() {
        assert_eq!(answer("dibs", "drop", &[]), None);
    }
}
