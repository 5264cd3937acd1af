//! Connections whose addresses this host translates: the far end knows them by others, so they cannot be
//! moved. New ones on a bump keep their address (`dibs-policy/src/rules/nftables_only.rs`).

use std::collections::HashMap;

use dibs_policy::conntrack::Connection;
use dibs_policy::translation;
use dibs_wire::FlowKey;

use crate::host::live::Live;
use crate::kernel::Kernel;

/// Why connections cannot be moved to a bump whose source is translated here.
pub(crate) async fn translated(
    kernel: &Kernel,
    lives: &[Live],
) -> anyhow::Result<HashMap<FlowKey, String>> {
    let mut refused = HashMap::new();
    let mut conntrack = kernel.conntrack()?;
    for pair in lives.iter().map(|live| live.pair) {
        let entry = conntrack.get(&pair).await?;
        // As its answers come, if they came here untranslated.
        let is_translated = |entry: &Connection| entry.reply != entry.original.reversed();
        let Some(entry) = entry.filter(is_translated) else {
            continue;
        };
        let seen = match entry.original.source() == pair.source() {
            true => entry.reply.destination(),
            false => entry.reply.source(),
        };
        let rule = translation::rule_for(pair.source(), pair.destination()).await?;
        let by = rule.map_or("a rule of the nat table".to_owned(), |r| format!("`{r}`"));
        refused.insert(
            pair,
            format!(
                "{by} shows it to the peer as {seen}: except {} from it, and connect anew",
                pair.dst
            ),
        );
    }
    Ok(refused)
}
