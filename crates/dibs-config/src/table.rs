//! A walk over parsed TOML that knows the place of everything.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Error, Invalid};

type Span = Range<usize>;

/// What a value was refused for: the rest of the sentence after the key, and a hint.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

impl Wrong {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Wrong {
            message: message.into(),
            hint: Some(hint.into()),
        }
    }

    pub(crate) fn bare(message: impl Into<String>) -> Self {
        Wrong {
            message: message.into(),
            hint: None,
        }
    }
}

/// The text that is being read, and the place of each key read so far.
pub(crate) struct Source<'a> {
    file: &'a str,
    text: &'a str,
    places: RefCell<BTreeMap<String, Span>>,
}

/// What a [`crate::Config`] keeps of its [`Source`], to place errors that are found later.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    file: String,
    text: String,
    places: BTreeMap<String, Span>,
}

impl Origin {
    pub(crate) fn error_at(&self, key: &str, message: String, hint: Option<String>) -> Error {
        let span = self.places.get(key).cloned().unwrap_or(0..0);
        Box::new(Invalid::at(&self.file, &self.text, span, message, hint)).into()
    }
}

impl<'a> Source<'a> {
    pub(crate) fn new(file: &'a str, text: &'a str) -> Self {
        Source {
            file,
            text,
            places: RefCell::default(),
        }
    }

    pub(crate) fn root(&'a self, known: &[&'static str]) -> Result<Table<'a>, Error> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let message = error.message().lines().collect::<Vec<_>>().join(", ");
            self.error(error.span().unwrap_or(0..0), message, None)
        })?;
        let span = 0..0;
        Table::open(
            self,
            String::new(),
            "the file",
            span,
            table.into_inner(),
            known,
        )
    }

    pub(crate) fn into_origin(self) -> Origin {
        Origin {
            file: self.file.to_owned(),
            text: self.text.to_owned(),
            places: self.places.into_inner(),
        }
    }

    pub(crate) fn error(&self, span: Span, message: String, hint: Option<String>) -> Error {
        Box::new(Invalid::at(self.file, self.text, span, message, hint)).into()
    }
}

/// A table, out of which keys are taken by name.
pub(crate) struct Table<'a> {
    source: &'a Source<'a>,
    /// `daemon`, `path.0`, `peer.1.endpoints`
    path: String,
    title: &'static str,
    span: Span,
    entries: Vec<(Spanned<String>, Spanned<DeValue<'a>>)>,
}

impl<'a> Table<'a> {
    /// Refuses keys that are not `known`; none known: any key may come.
    fn open(
        source: &'a Source<'a>,
        path: String,
        title: &'static str,
        span: Span,
        table: DeTable<'a>,
        known: &[&'static str],
    ) -> Result<Self, Error> {
        let mut entries: Vec<_> = table
            .into_iter()
            .map(|(key, value)| {
                (
                    Spanned::new(key.span(), key.into_inner().into_owned()),
                    value,
                )
            })
            .collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        for (key, _) in &entries {
            if !known.is_empty() && !known.contains(&key.get_ref().as_str()) {
                let unknown = key.get_ref().escape_debug();
                let message = format!("unknown key \"{unknown}\" in {title}");
                return Err(source.error(key.span(), message, Some(meant(key.get_ref(), known))));
            }
        }
        Ok(Table {
            source,
            path,
            title,
            span,
            entries,
        })
    }

    pub(crate) fn take(&mut self, key: &'static str) -> Option<Value<'a>> {
        let at = self
            .entries
            .iter()
            .position(|(name, _)| name.get_ref() == key)?;
        let (name, value) = self.entries.remove(at);
        Some(self.value(name, value))
    }

    pub(crate) fn require(&mut self, key: &'static str) -> Result<Value<'a>, Error> {
        self.take(key)
            .ok_or_else(|| self.error(format!("{} lacks \"{key}\"", self.title), None))
    }

    /// What was not taken, in order of the file, with the keys as they stand there.
    pub(crate) fn rest(mut self) -> Vec<Value<'a>> {
        let entries = std::mem::take(&mut self.entries);
        entries
            .into_iter()
            .map(|(name, value)| self.value(name, value))
            .collect()
    }

    pub(crate) fn error(&self, message: String, hint: Option<String>) -> Error {
        self.source.error(self.span.clone(), message, hint)
    }

    fn value(&self, key: Spanned<String>, value: Spanned<DeValue<'a>>) -> Value<'a> {
        let dot = if self.path.is_empty() { "" } else { "." };
        let path = format!("{}{dot}{}", self.path, key.get_ref());
        self.source
            .places
            .borrow_mut()
            .insert(path.clone(), value.span());
        let (key_span, span) = (key.span(), value.span());
        let key = key.into_inner();
        Value {
            source: self.source,
            path,
            key,
            key_span,
            span,
            value: value.into_inner(),
        }
    }
}

/// A value under its key, or one element of the list under it.
pub(crate) struct Value<'a> {
    source: &'a Source<'a>,
    path: String,
    key: String,
    key_span: Span,
    span: Span,
    value: DeValue<'a>,
}

impl<'a> Value<'a> {
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// An error at the value.
    pub(crate) fn error(&self, wrong: Wrong) -> Error {
        let message = format!("{} {}", self.key, wrong.message);
        self.source.error(self.span.clone(), message, wrong.hint)
    }

    /// An error at the key.
    pub(crate) fn key_error(&self, message: String, hint: Option<String>) -> Error {
        self.source.error(self.key_span.clone(), message, hint)
    }

    fn unexpected(&self, wanted: &str) -> Error {
        let kind = self.value.type_str();
        let article = if kind.starts_with(['a', 'i']) {
            "an"
        } else {
            "a"
        };
        self.error(Wrong::bare(format!(
            "is {article} {kind}, but has to be {wanted}"
        )))
    }

    pub(crate) fn is_empty_list(&self) -> bool {
        matches!(&self.value, DeValue::Array(array) if array.is_empty())
    }

    pub(crate) fn is_string(&self) -> bool {
        self.value.is_str()
    }

    pub(crate) fn string(&self) -> Result<&str, Error> {
        self.value
            .as_str()
            .ok_or_else(|| self.unexpected("a string"))
    }

    /// A string that `parse` understands.
    pub(crate) fn parse<T>(
        &self,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Result<T, Error> {
        parse(self.string()?).map_err(|wrong| self.error(wrong))
    }

    /// One of a few words.
    pub(crate) fn one_of<T: Copy>(&self, words: &[(&'static str, T)]) -> Result<T, Error> {
        self.parse(|text| {
            words
                .iter()
                .find(|(word, _)| *word == text)
                .map(|(_, value)| *value)
                .ok_or_else(|| {
                    let names: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                    Wrong::new(
                        format!("cannot be \"{}\"", text.escape_debug()),
                        meant(text, &names),
                    )
                })
        })
    }

    /// `true` or `false`.
    pub(crate) fn boolean(&self) -> Result<bool, Error> {
        self.value
            .as_bool()
            .ok_or_else(|| self.unexpected("true or false"))
    }

    /// A whole number within `range`.
    pub(crate) fn integer(&self, range: RangeInclusive<u32>) -> Result<u32, Error> {
        self.whole(range)
    }

    /// The same, which may be negative.
    pub(crate) fn signed(&self, range: RangeInclusive<i32>) -> Result<i32, Error> {
        self.whole(range)
    }

    fn whole<T: TryFrom<i128> + PartialOrd + std::fmt::Display>(
        &self,
        range: RangeInclusive<T>,
    ) -> Result<T, Error> {
        let integer = self
            .value
            .as_integer()
            .ok_or_else(|| self.unexpected("a whole number"))?;
        i128::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .and_then(|number| T::try_from(number).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.error(Wrong::bare(format!("has to be within {low} and {high}")))
            })
    }

    /// A number, with or without a fraction, within `range`.
    pub(crate) fn number(&self, range: RangeInclusive<f64>) -> Result<f64, Error> {
        let text = match &self.value {
            DeValue::Float(float) => float.as_str(),
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            _ => return Err(self.unexpected("a number")),
        };
        text.parse()
            .ok()
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let (low, high) = (range.start(), range.end());
                self.error(Wrong::bare(format!("has to be within {low} and {high}")))
            })
    }

    /// The elements of a list; a single value stands for a list of itself.
    pub(crate) fn one_or_many(self) -> Result<Vec<Value<'a>>, Error> {
        if matches!(self.value, DeValue::Array(_)) {
            self.list()
        } else {
            Ok(vec![self])
        }
    }

    /// The elements of a list that is not empty.
    pub(crate) fn list(self) -> Result<Vec<Value<'a>>, Error> {
        let DeValue::Array(array) = self.value else {
            return Err(self.unexpected("a list"));
        };
        if array.is_empty() {
            let message = format!("{} is empty", self.key);
            return Err(self.source.error(self.span, message, None));
        }
        let element = |(index, value): (usize, Spanned<DeValue<'a>>)| Value {
            source: self.source,
            path: format!("{}.{index}", self.path),
            key: self.key.clone(),
            key_span: self.key_span.clone(),
            span: value.span(),
            value: value.into_inner(),
        };
        Ok(array.into_iter().enumerate().map(element).collect())
    }

    /// A table `[title]` with these keys; see [`Table::open`].
    pub(crate) fn table(
        self,
        title: &'static str,
        known: &[&'static str],
    ) -> Result<Table<'a>, Error> {
        match self.value {
            DeValue::Table(table) => {
                Table::open(self.source, self.path, title, self.span, table, known)
            }
            _ => Err(self.key_error(format!("{} has to be a table, {title}", self.key), None)),
        }
    }

    /// Repeated tables `[[title]]` with these keys.
    pub(crate) fn tables(
        self,
        title: &'static str,
        known: &[&'static str],
    ) -> Result<Vec<Table<'a>>, Error> {
        if !matches!(self.value, DeValue::Array(_)) {
            let message = format!("{} has to be written as {title}, once for each", self.key);
            return Err(self.key_error(message, None));
        }
        self.list()?
            .into_iter()
            .map(|value| value.table(title, known))
            .collect()
    }
}

/// The hint for a word that is none of `known`: the nearest, or all.
pub(crate) fn meant(word: &str, known: &[&str]) -> String {
    let nearest = known
        .iter()
        .map(|&other| (distance(word, other), other))
        .min();
    match nearest {
        Some((far, other)) if far <= 1 + other.len() / 4 => format!("did you mean \"{other}\"?"),
        _ => format!("known are {}", known.join(", ")),
    }
}

/// Levenshtein distance, in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        for (a, b, edits) in [("", "abc", 3), ("port", "port", 0), ("prot", "port", 2)] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
            assert_eq!(distance(b, a), edits, "{b} {a}");
        }
    }

    #[test]
    fn hint_names_the_nearest_or_all() {
        let known = ["port", "mark_mask"];
        assert_eq!(meant("mark_msk", &known), "did you mean \"mark_mask\"?");
        assert_eq!(meant("colour", &known), "known are port, mark_mask");
    }
}
