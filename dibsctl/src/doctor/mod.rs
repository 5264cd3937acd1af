//! `doctor`: what would keep dibs from working on this host, each with what to do.
//!
//! [`host`] reads, and changes nothing: what has to be tried out is tried in a network namespace that nobody
//! else uses ([`trial`]). [`checks`] judge what was read; they know no host, and have their tests beside them.

mod checks;
mod finding;
mod host;
mod netfilter;
mod nft;
mod rules;
mod trial;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use dibs_config::Config;
use dibs_control::Status;
use serde_json::json;

use crate::output::{runtime, show};
use crate::units::{count, printable};
use checks::{
    clock, config, congestion, daemon, firewall, flavours, forwarding, kernel, managers, marks,
    mtu, paths, routing, rp_filter, translation, tun, wake,
};
use finding::{Finding, Outcome};
use host::Host;

/// Where the daemon reads it, if nothing else is said.
const CONFIG: &str = "/etc/dibs/dibsd.toml";

/// Value of a sysctl, by its name with dots.
pub(crate) fn sysctl(name: &str) -> Option<String> {
    host::sysctl(&name.replace('.', "/"))
}

/// Looks at this host, and says what it found.
///
/// # Errors
/// Something would keep dibs from working.
pub(crate) fn run(file: Option<PathBuf>, socket: &Path, json: bool) -> Result<()> {
    let findings = runtime()?.block_on(examine(file, socket));
    let number = |outcome| findings.iter().filter(|f| f.outcome == outcome).count();
    let failed = number(Outcome::Failed);
    let answer = json!({
        "ok": failed == 0,
        "failed": failed,
        "warnings": number(Outcome::Warning),
        "skipped": number(Outcome::Skipped),
        "checks": findings,
    });
    show(json, &answer, || report(&findings))?;
    if failed > 0 {
        bail!("{} failed", count(failed, "check"));
    }
    Ok(())
}

/// Every check in turn, those first on which the others rest.
async fn examine(file: Option<PathBuf>, socket: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let named = file.is_some();
    let file = file.unwrap_or_else(|| PathBuf::from(CONFIG));
    let loaded = dibs_config::load(&file);
    findings.extend(config::judge(&file, named, &loaded, &host::key(&loaded)));
    let config = loaded.ok();
    let running = host::status(socket);
    let host = Host::read().await;

    findings.push(kernel::judge(&host.release));
    findings.push(tun::judge(host.root, &host::open_tun()));
    findings.extend(trial::judge(trial::run(host.root).await));
    findings.push(flavours::judge(&host.tables));
    findings.extend(marks::judge(&host.tables, config.as_ref()));
    findings.extend(routing::judge(host.network.as_ref(), config.as_ref()));
    findings.extend(managers::judge(&host.managers));
    findings.extend(of_config(&host, config.as_ref(), running.as_ref().ok()).await);
    findings.push(clock::judge(host.now, host.synchronized));
    findings.push(congestion::judge(host.congestion.as_deref()));
    findings.push(wake::judge(&mut host::wakes()));
    findings.extend(daemon::judge(&running));
    findings
}

/// What depends on paths and peers.
async fn of_config(host: &Host, config: Option<&Config>, status: Option<&Status>) -> Vec<Finding> {
    let running = status.is_some();
    let Some(config) = config else {
        let why = "without a configuration neither paths nor peers are known";
        return vec![Finding::skipped(
            "paths",
            why,
            "name a file with --config FILE",
        )];
    };
    let ways = host.ways(config, running).await;
    let mut findings = Vec::new();
    for way in &ways {
        findings.push(paths::judge(way));
        findings.extend(mtu::judge(way));
        findings.extend(rp_filter::judge(way));
    }
    if !running {
        let holders = host::port_holders(config);
        findings.push(paths::port(config.daemon.port, &holders, host.root));
    }
    let silent = status.map_or(&[][..], |status| &status.silent_ports);
    let leading = host.leading().await;
    findings.extend(firewall::judge(host, config, &ways, silent, &leading));
    findings.extend(forwarding::judge(config, host::sysctl));
    findings.extend(translation::judge(&host.translated(config).await));
    findings.extend(translation::judge_leading(&leading));
    findings
}

/// A line for each finding, and beneath it what to do.
fn report(findings: &[Finding]) -> String {
    let mut text = String::new();
    let names = findings.iter().map(|finding| finding.title().len());
    let width = names.max().unwrap_or(0);
    for finding in findings {
        let (outcome, title) = (finding.outcome.word(), finding.title());
        let found = printable(&finding.found);
        text += &format!("{outcome:<7}  {title:<width$}  {found}\n");
        if let Some(advice) = &finding.advice {
            text += &format!("{:7}  {:width$}  > {}\n", "", "", printable(advice));
        }
    }
    let number = |outcome| findings.iter().filter(|f| f.outcome == outcome).count();
    text += &format!(
        "{}: {} failed, {}, {} skipped\n",
        count(findings.len(), "check"),
        number(Outcome::Failed),
        count(number(Outcome::Warning), "warning"),
        number(Outcome::Skipped),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_aligns_and_says_what_to_do() {
        let findings = [
            Finding::fine("kernel", "6.18"),
            Finding::failed("tun", "no\u{1b}[2J", "load it"),
            Finding::warning("rp_filter", "strict", "make it loose").about("wlan"),
        ];
        assert_eq!(
            report(&findings),
            "ok       kernel          6.18\n\
             FAILED   tun             no\u{fffd}[2J\n                         > load it\n\
             warning  rp_filter wlan  strict\n                         > make it loose\n\
             3 checks: 1 failed, 1 warning, 0 skipped\n"
        );
    }
}
