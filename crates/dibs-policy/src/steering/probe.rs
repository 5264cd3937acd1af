//! Whether the kernel takes a rule, before anything depends on it.

use super::{Steering, Variant, forbidden};
use crate::kernel::Kernel;
use crate::rule::{Match, Rule, Verdict};
use crate::rules::further;
use crate::runner::CommandRunner;
use crate::{ClassRule, Error, Family};

/// A chain that no packet gets to, and that does not stay.
const CHAIN: &str = "DIBS-PROBE";

/// Rule as the kernel shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// The families in which it is taken; one at least.
    pub families: Vec<Family>,
    /// Why it is not in another, in the words of iptables.
    pub refusal: Option<(Family, String)>,
}

impl<R: CommandRunner, K: Kernel> Steering<R, K> {
    /// Has the kernel look at what a rule matches, in these families; nothing stays of it.
    ///
    /// # Errors
    /// [`Error::Refused`] if it is taken in none.
    pub async fn probe(&mut self, rule: &ClassRule, of: &[Family]) -> Result<Probed, Error> {
        let variant = match self.variant {
            Some(variant) => variant,
            None => self.choose().await?,
        };
        self.variant = Some(variant);
        let mut probed = Probed {
            families: Vec::new(),
            refusal: None,
        };
        for &family in of.iter().filter(|family| rule.concerns(**family)) {
            match self.try_out(variant, family, rule).await? {
                None => probed.families.push(family),
                Some(why) => probed.refusal = Some((family, why)),
            }
        }
        match probed.refusal {
            Some((_, why)) if probed.families.is_empty() => Err(Error::Refused(why)),
            _ => Ok(probed),
        }
    }

    /// Why a family's iptables does not take a rule, if it does not.
    async fn try_out(
        &self,
        variant: Variant,
        family: Family,
        rule: &ClassRule,
    ) -> Result<Option<String>, Error> {
        let by = { rule.interface.clone() }.map(|interface| Match::Out(interface, true));
        let matches: Vec<Match> = by.into_iter().chain(further(rule)).collect();
        let text = Rule::new(matches, Verdict::Return).iptables();
        let text = text.expect("class rules are said to iptables");
        let input = format!("*mangle\n:{CHAIN} - [0:0]\n-A {CHAIN} {text}\nCOMMIT\n");
        let tried = self.restore(variant, family, &input).await;
        if let Err(error @ Error::TimedOut { .. }) = tried {
            return Err(error);
        }
        let removal = format!("*mangle\n:{CHAIN} - [0:0]\n-X {CHAIN}\nCOMMIT\n");
        self.restore(variant, family, &removal).await?;
        match tried {
            Ok(()) => Ok(None),
            Err(Error::Command { stderr, .. }) if !forbidden(&stderr) => Ok(Some(gist(&stderr))),
            Err(error) => Err(error),
        }
    }
}

/// The sentence in what iptables-restore says, without its name and the place in its input.
fn gist(stderr: &str) -> String {
    let line = stderr.lines().find(|line| !line.trim().is_empty());
    let line = line.unwrap_or("without a reason").trim();
    let said = match line.split_once(": ") {
        Some((program, said)) if program.contains("restore") => said,
        _ => line,
    };
    said.trim_end_matches('.').to_owned()
}
