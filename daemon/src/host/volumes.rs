//! What the paths carried this month, of those whose volume is limited. It is kept in a file that outlives the host's
//! next start, and begins anew with each calendar month by local time.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use dibs_config::Volume;
use serde::{Deserialize, Serialize};

/// In the configured directory.
const FILE: &str = "volumes.json";
/// The form of the file; others are not understood.
const VERSION: u32 = 1;
/// Between two writes, unless something came of what was carried.
const WRITE_EVERY: Duration = Duration::from_secs(10);

/// A calendar month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Month {
    year: i64,
    /// 1 to 12.
    month: u8,
}

impl Month {
    /// The one of a day, counted from 1970-01-01.
    fn of_day(day: i64) -> Self {
        // Years begin in March, so that the leap day is their last; 400 of them are 146,097 days.
        let day = day + 719_468;
        let (era, of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let from_march = (5 * of_year + 2) / 153;
        let (month, later) = match from_march {
            0..=9 => (from_march + 3, 0),
            _ => (from_march - 9, 1),
        };
        Self {
            year: year + era * 400 + later,
            month: u8::try_from(month).expect("there are twelve"),
        }
    }

    /// The present one by local time.
    pub(crate) fn now() -> Self {
        let offset = i64::from(dibs_io::local_time().utc_offset);
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let utc = i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX / 2);
        Self::of_day((utc + offset).div_euclid(86_400))
    }

    fn parse(text: &str) -> Option<Self> {
        let (year, month) = text.split_once('-')?;
        let (year, month) = (year.parse().ok()?, month.parse().ok()?);
        (1..=12).contains(&month).then_some(Self { year, month })
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:02}", self.year, self.month)
    }
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    /// `2026-11`
    month: String,
    /// Bytes by path.
    used: BTreeMap<String, u64>,
}

/// How much of its volume a path has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Less than 90 %, or it has no limit.
    #[default]
    Free,
    /// 90 % or more.
    Near,
    /// All of it.
    Spent,
}

/// A path of which another part is used than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// By index of the configuration.
    pub(crate) path: usize,
    pub(crate) before: Stage,
    pub(crate) now: Stage,
}

/// What was carried this month.
#[derive(Debug)]
pub(crate) struct Volumes {
    file: PathBuf,
    month: Month,
    /// Bytes, by the names of paths.
    used: BTreeMap<String, u64>,
    /// What the data path had counted at the last look, by index of the configuration's paths.
    seen: Vec<u64>,
    stages: Vec<Stage>,
    /// The file does not say what is here.
    unwritten: bool,
    written: Option<Instant>,
}

impl Volumes {
    /// What is known of these many paths; a file that cannot be understood counts for none.
    pub(crate) fn load(directory: &Path, paths: usize, now: Month) -> Self {
        let file = directory.join(FILE);
        let kept = match read(&file) {
            Ok(kept) => kept,
            Err(why) => {
                tracing::warn!("{why:#}: the data caps of this month start at zero");
                None
            }
        };
        let (month, used) = kept.unwrap_or((now, BTreeMap::new()));
        Self {
            file,
            month,
            used,
            seen: vec![0; paths],
            stages: vec![Stage::Free; paths],
            unwritten: false,
            written: None,
        }
    }

    /// Bytes that a path has carried while its volume was limited.
    pub(crate) fn used(&self, name: &str) -> u64 {
        self.used.get(name).copied().unwrap_or(0)
    }

    /// How much of its volume a path has used, by index.
    pub(crate) fn stage(&self, path: usize) -> Stage {
        self.stages[path]
    }

    /// Adds what the data path counted since the last look to paths that have a limit. Nobody looks back: an earlier
    /// month is a clock that is not set yet.
    pub(crate) fn count<'a>(
        &mut self,
        limits: impl Iterator<Item = (&'a str, Option<Volume>)>,
        totals: &[u64],
        now: Month,
    ) {
        if now > self.month {
            self.month = now;
            self.used.clear();
            self.unwritten = true;
        }
        for ((seen, total), (name, limit)) in self.seen.iter_mut().zip(totals).zip(limits) {
            let more = total.saturating_sub(*seen);
            *seen = (*seen).max(*total);
            if limit.is_some() && more > 0 {
                let used = self.used.entry(name.to_owned()).or_default();
                *used = used.saturating_add(more);
                self.unwritten = true;
            }
        }
    }

    /// Holds what was used against these limits, and returns what that changes.
    pub(crate) fn judge<'a>(
        &mut self,
        limits: impl Iterator<Item = (&'a str, Option<Volume>)>,
    ) -> Vec<Turn> {
        let mut turns = Vec::new();
        for (path, (name, limit)) in limits.enumerate() {
            let used = self.used(name);
            let now = match limit.map(Volume::bytes) {
                Some(limit) if used >= limit => Stage::Spent,
                Some(limit) if used >= limit - limit / 10 => Stage::Near,
                _ => Stage::Free,
            };
            let before = std::mem::replace(&mut self.stages[path], now);
            if before != now {
                turns.push(Turn { path, before, now });
            }
        }
        turns
    }

    /// The file could not be written.
    pub(crate) fn note_unwritten(&mut self) {
        self.unwritten = true;
    }

    /// What is to be written where, if it is time.
    pub(crate) fn due(&mut self, at_once: bool) -> Option<(PathBuf, String)> {
        let now = Instant::now();
        let waits = |written: Instant| now.duration_since(written) < WRITE_EVERY && !at_once;
        if !self.unwritten || self.written.is_some_and(waits) {
            return None;
        }
        self.written = Some(now);
        self.unwritten = false;
        let kept = Kept {
            version: VERSION,
            month: self.month.to_string(),
            used: self.used.clone(),
        };
        let text = serde_json::to_string_pretty(&kept).expect("our types have string keys only");
        Some((self.file.clone(), text))
    }
}

fn read(file: &Path) -> anyhow::Result<Option<(Month, BTreeMap<String, u64>)>> {
    let place = file.display();
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {place}")),
    };
    let kept: Kept =
        serde_json::from_str(&text).with_context(|| format!("{place} is no file of volumes"))?;
    let month = Month::parse(&kept.month);
    ensure!(
        kept.version == VERSION && month.is_some(),
        "{place} is of another version"
    );
    Ok(month.map(|month| (month, kept.used)))
}

/// Replaces the file as a whole.
pub(crate) fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let new = file.with_extension("json.new");
    let write = || -> std::io::Result<()> {
        if let Some(directory) = file.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)?;
        }
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut opened = options.open(&new)?;
        opened.write_all(text.as_bytes())?;
        opened.sync_all()?;
        fs::rename(&new, file)
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn month(text: &str) -> Month {
        Month::parse(text).unwrap()
    }

    fn limits(volume: Option<u64>) -> impl Iterator<Item = (&'static str, Option<Volume>)> {
        let wlan = volume.map(|bytes| Volume::new(bytes).unwrap());
        [("eth", None), ("wlan", wlan)].into_iter()
    }

    #[test]
    fn days_are_of_their_months() {
        for (day, text) in [
            (0, "1970-01"),
            (30, "1970-01"),
            (31, "1970-02"),
            (59, "1970-03"),
            (-1, "1969-12"),
            (789, "1972-02"),
            (790, "1972-03"),
            (11_016, "2000-02"),
            (11_017, "2000-03"),
            (20_453, "2025-12"),
            (20_454, "2026-01"),
        ] {
            assert_eq!(Month::of_day(day).to_string(), text, "day {day}");
        }
        assert!(month("2026-01") > month("2025-12"));
        assert_eq!(
            (Month::parse("2026-13"), Month::parse("2026")),
            (None, None)
        );
    }

    #[test]
    fn what_is_carried_is_counted_by_differences_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("lib");
        let november = month("2026-11");
        let mut volumes = Volumes::load(&place, 2, november);
        assert!(volumes.due(true).is_none(), "there is nothing to keep");
        // Before there is a limit nobody counts.
        volumes.count(limits(None), &[MB, MB], november);
        assert_eq!(volumes.used("wlan"), 0);
        let limit = Some(10 * MB);
        volumes.count(limits(limit), &[5 * MB, 4 * MB], november);
        volumes.count(limits(limit), &[6 * MB, 5 * MB], november);
        assert_eq!((volumes.used("eth"), volumes.used("wlan")), (0, 4 * MB));
        assert_eq!(volumes.judge(limits(limit)), []);
        let (file, text) = volumes.due(false).unwrap();
        write(&file, &text).unwrap();
        volumes.count(limits(limit), &[6 * MB, 6 * MB], november);
        assert!(volumes.due(false).is_none(), "that was a moment ago");

        // The next daemon's data path counts from nothing.
        let mut volumes = Volumes::load(&place, 2, november);
        volumes.count(limits(limit), &[0, 5 * MB], november);
        let turn = |before, now| Turn {
            path: 1,
            before,
            now,
        };
        assert_eq!(
            volumes.judge(limits(limit)),
            [turn(Stage::Free, Stage::Near)]
        );
        volumes.count(limits(limit), &[0, 6 * MB], november);
        assert_eq!(
            volumes.judge(limits(limit)),
            [turn(Stage::Near, Stage::Spent)]
        );
        assert_eq!(volumes.judge(limits(limit)), [], "it is told once");
        // A larger one, and the next month.
        assert_eq!(
            volumes.judge(limits(Some(20 * MB))),
            [turn(Stage::Spent, Stage::Free)]
        );
        assert_eq!(
            volumes.judge(limits(limit)),
            [turn(Stage::Free, Stage::Spent)]
        );
        // A clock that is not set yet is no new month.
        volumes.count(limits(limit), &[0, 6 * MB], month("1970-01"));
        assert_eq!(volumes.used("wlan"), 10 * MB);
        volumes.count(limits(limit), &[0, 7 * MB], month("2026-12"));
        assert_eq!(volumes.used("wlan"), MB);
        assert_eq!(
            volumes.judge(limits(limit)),
            [turn(Stage::Spent, Stage::Free)]
        );
    }

    #[test]
    fn a_file_that_is_none_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let november = month("2026-11");
        for text in [
            "",
            "{}",
            r#"{"version":2,"month":"2026-11","used":{"wlan":1}}"#,
        ] {
            fs::write(dir.path().join(FILE), text).unwrap();
            assert!(read(&dir.path().join(FILE)).is_err(), "{text}");
            assert_eq!(Volumes::load(dir.path(), 2, november).used("wlan"), 0);
        }
    }
}
