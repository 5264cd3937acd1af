//! What a check found.

use serde::Serialize;

/// What one check found of one thing, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// Of the check, for programs: it stays.
    pub(crate) check: &'static str,
    /// The path, peer or file that it is about.
    pub(crate) subject: Option<String>,
    /// How it came out.
    #[serde(rename = "result")]
    pub(crate) outcome: Outcome,
    /// One sentence.
    pub(crate) found: String,
    /// What to do, where there is something to do.
    pub(crate) advice: Option<String>,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Nothing stands in the way.
    Ok,
    /// dibs works, but for what is named.
    Warning,
    /// dibs does not work, or not as configured.
    Failed,
    /// It could not be looked at.
    Skipped,
}

impl Outcome {
    /// For the report: what fails is to be seen.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Warning => "warning",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        }
    }
}

impl Finding {
    fn new(check: &'static str, outcome: Outcome, found: String, advice: Option<String>) -> Self {
        Finding {
            check,
            subject: None,
            outcome,
            found,
            advice,
        }
    }

    /// Nothing stands in the way.
    pub(crate) fn fine(check: &'static str, found: impl Into<String>) -> Self {
        Finding::new(check, Outcome::Ok, found.into(), None)
    }

    /// dibs works, but for this.
    pub(crate) fn warning(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Finding::new(check, Outcome::Warning, found.into(), Some(advice.into()))
    }

    /// dibs does not work.
    pub(crate) fn failed(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Finding::new(check, Outcome::Failed, found.into(), Some(advice.into()))
    }

    /// It could not be looked at, and how it could be.
    pub(crate) fn skipped(
        check: &'static str,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Finding::new(check, Outcome::Skipped, why.into(), Some(advice.into()))
    }

    /// It could not be looked at, for only root may.
    pub(crate) fn needs_root(check: &'static str) -> Self {
        Finding::skipped(check, "only root can check this", "run doctor with sudo")
    }

    /// Names what it is about.
    pub(crate) fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    /// The check, and what it is about.
    pub(crate) fn title(&self) -> String {
        match &self.subject {
            Some(subject) => format!("{} {}", self.check, crate::units::printable(subject)),
            None => self.check.to_owned(),
        }
    }
}
