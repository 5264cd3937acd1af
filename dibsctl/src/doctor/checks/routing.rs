//! Whether rules and tables of routing of other programs stand in the way, such as those of VPNs.

use dibs_config::Config;
use serde_json::Value;

use crate::doctor::finding::Finding;
use crate::doctor::host::Network;

const CHECK: &str = "routing";

/// Where the rules of dibs stand.
const PRIORITY: u64 = 5200;

/// The protocol number by which routes and rules of dibs are told.
const OURS: &str = "219";

/// As many tables as there are numbers of bumps.
const TABLES: u64 = 16;

/// By the rules and routes of both IP versions.
pub(crate) fn judge(network: Option<&Network>, config: Option<&Config>) -> Vec<Finding> {
    let Some(network) = network else {
        let why = "routes and rules cannot be read without iproute2";
        return vec![Finding::skipped(CHECK, why, "install the package iproute2")];
    };
    let base = config.map_or(5200, |config| config.daemon.table_base.into());
    let mut findings = Vec::new();
    let mut seen = Vec::new();
    for rule in network.rules.iter().filter_map(Value::as_array).flatten() {
        if is_before(rule) && !seen.contains(&rule["priority"]) {
            seen.push(rule["priority"].clone());
            findings.push(Finding::warning(
                CHECK,
                format!(
                    "rule {} sends everything to table {} before the rules of dibs",
                    rule["priority"],
                    rule["table"].as_str().unwrap_or("?")
                ),
                "let the program that made it (most likely a VPN) use a priority above 5200",
            ));
        }
    }
    let routes = network.routes.iter().filter_map(Value::as_array).flatten();
    let foreign = |route: &&Value| {
        let table = route["table"].as_str().and_then(|t| t.parse::<u64>().ok());
        let table = table.or(route["table"].as_u64());
        table.is_some_and(|table| (base..base + TABLES).contains(&table)) && !is_ours(route)
    };
    if let Some(route) = routes.into_iter().find(foreign) {
        findings.push(Finding::failed(
            CHECK,
            format!(
                "another program has routes in table {}, which is for a bump",
                route["table"]
            ),
            "set another table_base in [daemon]",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::fine(
            CHECK,
            "no rule or table of other programs interferes",
        ));
    }
    findings
}

/// Whether another program's rule is asked before ours, about every packet.
fn is_before(rule: &Value) -> bool {
    let priority = rule["priority"].as_u64().unwrap_or(u64::MAX);
    let limited = [
        "fwmark",
        "iif",
        "oif",
        "srclen",
        "dstlen",
        "dst",
        "uid_start",
        "dport",
        "sport",
    ];
    let limited = limited.iter().any(|key| rule.get(key).is_some());
    let to_table = rule.get("table").is_some();
    let from_all = rule["src"] == "all" && rule.get("not").is_none();
    let partial = rule.get("suppress_prefixlen").is_some();
    (1..=PRIORITY).contains(&priority)
        && !is_ours(rule)
        && !limited
        && !partial
        && to_table
        && from_all
}

fn is_ours(of: &Value) -> bool {
    of["protocol"] == OURS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use serde_json::json;

    fn outcomes(rules: Value, routes: Value) -> Vec<Outcome> {
        let network = Network {
            rules: [rules, Value::Null],
            routes: [routes, Value::Null],
            ..Network::default()
        };
        let findings = judge(Some(&network), None);
        findings.iter().map(|finding| finding.outcome).collect()
    }

    #[test]
    fn a_vpn_that_takes_everything_first_is_told() {
        let local = json!({"priority": 0, "src": "all", "table": "local"});
        let ours = json!({"priority": 5200, "src": "all", "fwmark": "0x1000000",
            "fwmask": "0xf000000", "table": "5201", "protocol": "219"});
        let wireguard = json!({"not": null, "priority": 5000, "src": "all", "fwmark": "0xca6c",
            "table": "51820"});
        let partial =
            json!({"priority": 5001, "src": "all", "table": "main", "suppress_prefixlen": 0});
        let first = json!({"priority": 100, "src": "all", "table": "7"});
        let harmless = json!([local, ours, wireguard, partial]);
        assert_eq!(outcomes(harmless, Value::Null), [Outcome::Ok]);
        assert_eq!(outcomes(json!([first]), Value::Null), [Outcome::Warning]);
    }

    #[test]
    fn tables_of_bumps_are_dibs_own() {
        let route = |table: &str, protocol: &str| json!([{"dst": "default", "table": table, "protocol": protocol}]);
        assert_eq!(
            outcomes(Value::Null, route("5203", "static")),
            [Outcome::Failed]
        );
        assert_eq!(outcomes(Value::Null, route("5203", "219")), [Outcome::Ok]);
        assert_eq!(
            outcomes(Value::Null, route("5216", "static")),
            [Outcome::Ok]
        );
        assert_eq!(
            outcomes(Value::Null, route("main", "static")),
            [Outcome::Ok]
        );
    }
}
