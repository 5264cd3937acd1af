//! How long a program waits for a processor: the daemon does too, with each packet in its hands.

use std::time::Duration;

use crate::doctor::finding::Finding;
use crate::units::micros;

/// A round trip between neighbours; more shows in every connection.
const MOST: Duration = Duration::from_millis(5);

/// By how much later than asked for it was woken, several times. They are sorted.
pub(crate) fn judge(late: &mut [Duration]) -> Finding {
    late.sort_unstable();
    let at = |part: usize| late.get(late.len().saturating_sub(1) * part / 100).copied();
    let (Some(median), Some(high)) = (at(50), at(95)) else {
        return Finding::skipped("time_to_wake", "it was not measured", "run doctor again");
    };
    let text = |time: Duration| micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    let found = format!("half within {}, 95 % within {}", text(median), text(high));
    if high > MOST {
        let advice = "leave this host some processor time; let dibsd go before others (LimitNICE=-15 \
                      in configs/dibsd.service)";
        return Finding::warning("time_to_wake", found, advice);
    }
    Finding::fine("time_to_wake", found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn seldom_late_is_no_matter() {
        let mut late = [Duration::from_micros(60); 100];
        late[3] = Duration::from_secs(1);
        let finding = judge(&mut late);
        assert_eq!(finding.outcome, Outcome::Ok);
        assert_eq!(finding.found, "half within 60 us, 95 % within 60 us");
        late[10..30].fill(Duration::from_millis(6));
        assert_eq!(judge(&mut late).outcome, Outcome::Warning);
        assert_eq!(judge(&mut []).outcome, Outcome::Skipped);
    }
}
