//! Whether there is a configuration that can be used.

use std::io::ErrorKind;
use std::path::Path;

use dibs_config::{Config, Error, KeyFileError};

use crate::doctor::finding::Finding;

/// By what came of loading the file, which the user `named` or not, and of reading the private key.
pub(crate) fn judge(
    file: &Path,
    named: bool,
    loaded: &Result<Config, Error>,
    key: &Option<Result<(), KeyFileError>>,
) -> Vec<Finding> {
    let subject = file.display().to_string();
    let config = match loaded {
        Ok(config) => config,
        Err(Error::Read { .. }) if !named && !file.exists() => {
            let advice = "create it with dibsctl init, or name another file with --config FILE";
            return vec![
                Finding::warning("config", "the file does not exist yet", advice).about(subject),
            ];
        }
        Err(error @ Error::Read { .. }) => {
            let advice = "run doctor with sudo, or name another file with --config FILE";
            return vec![Finding::failed("config", error.to_string(), advice).about(subject)];
        }
        Err(error) => {
            let advice = format!("correct it; dibsctl check {subject} shows the line");
            return vec![Finding::failed("config", error.to_string(), advice).about(subject)];
        }
    };
    let warnings = config.warnings();
    let checked = match config.check_carried() {
        Err(error) => Finding::failed(
            "config",
            error.to_string(),
            "add what is missing, or use another bump",
        ),
        Ok(()) if warnings.is_empty() => Finding::fine("config", "the file is valid"),
        Ok(()) => Finding::warning(
            "config",
            warnings.join("; "),
            "see the threat model (docs/threat-model.md)",
        ),
    };
    let mut findings = vec![checked.about(subject)];
    findings.extend(key.as_ref().map(self::key));
    findings
}

fn key(read: &Result<(), KeyFileError>) -> Finding {
    match read {
        Ok(()) => Finding::fine(
            "private_key",
            "the key is valid, and only its owner can read it",
        ),
        Err(KeyFileError::Io(_, error)) if error.kind() == ErrorKind::PermissionDenied => {
            Finding::needs_root("private_key")
        }
        Err(error) => Finding::failed(
            "private_key",
            error.to_string(),
            "make one: umask 077; dibsctl genkey > FILE, as root",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    const GOOD: &str = "[[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n";

    fn outcome(file: &str, named: bool, text: Option<&str>) -> Outcome {
        let loaded = match text {
            Some(text) => dibs_config::parse(file, text),
            None => dibs_config::load(Path::new(file)),
        };
        judge(Path::new(file), named, &loaded, &None)[0].outcome
    }

    #[test]
    fn a_file_is_missing_wrong_or_right() {
        assert_eq!(outcome("/no/file", false, None), Outcome::Warning);
        assert_eq!(outcome("/no/file", true, None), Outcome::Failed);
        assert_eq!(outcome("f", false, Some("[dae")), Outcome::Failed);
        assert_eq!(outcome("f", false, Some(GOOD)), Outcome::Ok);
        let warned = format!("[daemon]\nfail = \"open\"\n{GOOD}");
        assert_eq!(outcome("f", false, Some(&warned)), Outcome::Warning);
        let share = format!("[daemon]\ndefault_bump = \"share\"\n{GOOD}");
        assert_eq!(outcome("f", false, Some(&share)), Outcome::Failed);
    }

    #[test]
    fn a_key_that_only_root_reads_is_no_fault() {
        let error = |kind: ErrorKind| KeyFileError::Io("/k".into(), kind.into());
        let outcome = |kind| key(&Err(error(kind))).outcome;
        assert_eq!(outcome(ErrorKind::PermissionDenied), Outcome::Skipped);
        assert_eq!(outcome(ErrorKind::NotFound), Outcome::Failed);
    }
}
