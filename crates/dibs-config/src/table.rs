//! The file's TOML as serde reads it, where every fault has a place, the key it is under, and a hint.

use std::fmt;
use std::iter::Peekable;
use std::ops::Range;
use std::vec::IntoIter;

use serde::Deserialize;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::error::{Error, Invalid};

type Span = Range<usize>;

/// Fault of a value: the rest of the sentence after the key, and a hint.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    /// Index of the element at fault, in a list.
    element: Option<usize>,
    /// Place, from where the message is a whole sentence.
    place: Option<Span>,
}

impl Wrong {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Wrong {
            hint: Some(hint.into()),
            ..Wrong::bare(message)
        }
    }

    pub(crate) fn bare(message: impl Into<String>) -> Self {
        Wrong {
            message: message.into(),
            hint: None,
            element: None,
            place: None,
        }
    }

    /// Fault of one element of the list that is read.
    pub(crate) fn of_element(self, index: usize) -> Self {
        let element = Some(index);
        Wrong { element, ..self }
    }

    fn at(self, place: Span) -> Self {
        let place = Some(place);
        Wrong { place, ..self }
    }

    /// The same, placed and with its subject, unless it has them.
    fn under(mut self, subject: &str, place: Span) -> Self {
        if self.place.is_none() {
            self.message = format!("{subject} {}", self.message);
            self.place = Some(place);
        }
        self
    }
}

/// Three lines: serde carries the text of a fault through any type that reads itself, and nothing else.
impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hint = self.hint.as_deref().unwrap_or_default();
        let element = self.element.map(|index| index.to_string());
        write!(
            f,
            "{}\n{hint}\n{}",
            self.message,
            element.unwrap_or_default()
        )
    }
}

impl std::error::Error for Wrong {}

impl serde::de::Error for Wrong {
    fn custom<T: fmt::Display>(text: T) -> Self {
        let text = text.to_string();
        let mut lines = text.split('\n');
        let message = lines.next().unwrap_or_default();
        let hint = lines.next().filter(|hint| !hint.is_empty());
        Wrong {
            hint: hint.map(str::to_owned),
            element: lines.next().and_then(|index| index.parse().ok()),
            ..Wrong::bare(message)
        }
    }

    fn invalid_type(found: Unexpected<'_>, wanted: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Bool(_) => "a boolean",
            Unexpected::Float(_) => "a float",
            Unexpected::Str(_) => "a string",
            Unexpected::Seq => "an array",
            Unexpected::Map => "a table",
            Unexpected::Other(DATETIME) => "a datetime",
            _ => "an integer",
        };
        let wanted = match wanted.to_string().as_str() {
            "a boolean" => "true or false",
            "a sequence" => "a list",
            "i128" => "a whole number",
            "f64" => "a number",
            other => return Wrong::bare(format!("is {found}, but has to be {other}")),
        };
        Wrong::bare(format!("is {found}, but has to be {wanted}"))
    }

    fn unknown_variant(word: &str, known: &'static [&'static str]) -> Self {
        no_such_word(word, known)
    }

    fn missing_field(key: &'static str) -> Self {
        Wrong::bare(format!("lacks \"{key}\""))
    }
}

/// Text of a file, kept to place what is found wrong once it is read.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    file: String,
    text: String,
}

impl Origin {
    pub(crate) fn new(file: &str, text: &str) -> Self {
        let [file, text] = [file, text].map(str::to_owned);
        Origin { file, text }
    }

    /// Reads the whole file.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let table = DeTable::parse(&self.text).map_err(|error| {
            let message = error.message().lines().collect::<Vec<_>>().join(", ");
            self.error(error.span().unwrap_or(0..0), message, None)
        })?;
        let root = Node {
            key: &Spanned::new(0..0, "".into()),
            value: &Spanned::new(0..0, DeValue::Table(table.into_inner())),
            depth: 0,
            is_lenient: false,
        };
        T::deserialize(root).map_err(|wrong| {
            let place = wrong.place.unwrap_or(0..0);
            self.error(place, wrong.message, wrong.hint)
        })
    }

    /// Fault of the value at a path such as `peer.0.endpoints.eth`; the message begins with its key.
    pub(crate) fn wrong(&self, path: &str, wrong: Wrong) -> Error {
        let mut parts = path.splitn(PATH_PARTS, '.').collect::<Vec<_>>();
        parts.retain(|part| part.parse::<usize>().is_err());
        let key = parts.last().copied().unwrap_or_default();
        self.at_value(path, format!("{key} {}", wrong.message), wrong.hint)
    }

    /// Fault at the value there, or at the top of the file, if it is left out.
    pub(crate) fn at_value(&self, path: &str, message: String, hint: Option<String>) -> Error {
        let [_, value] = self.place(path).unwrap_or_default();
        self.error(value, message, hint)
    }

    /// Fault at the key there.
    pub(crate) fn at_key(&self, path: &str, message: String, hint: Option<String>) -> Error {
        let [key, _] = self.place(path).unwrap_or_default();
        self.error(key, message, hint)
    }

    /// True if the file has this.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.place(path).is_some()
    }

    /// Places of a key and its value.
    fn place(&self, path: &str) -> Option<[Span; 2]> {
        let root = DeTable::parse(&self.text).ok()?.into_inner();
        let mut key = 0..0;
        let mut value = &Spanned::new(0..0, DeValue::Table(root));
        for part in path.splitn(PATH_PARTS, '.') {
            value = match value.get_ref() {
                DeValue::Table(table) => {
                    let (name, value) = table.iter().find(|(name, _)| name.get_ref() == part)?;
                    key = name.span();
                    value
                }
                list => list.get(part.parse::<usize>().ok()?)?,
            };
        }
        Some([key, value.span()])
    }

    fn error(&self, span: Span, message: String, hint: Option<String>) -> Error {
        Box::new(Invalid::at(&self.file, &self.text, span, message, hint)).into()
    }
}

/// Parts of the longest path. The last may have dots: it is the name of a local path.
const PATH_PARTS: usize = 4;

/// A list, or a single value that stands for a list of itself.
#[derive(Deserialize)]
#[serde(rename = "$lenient")]
pub(crate) struct Many<T>(pub(crate) Vec<T>);

/// A string, or a whole number as its text.
#[derive(Deserialize)]
#[serde(rename = "$lenient")]
pub(crate) struct Word(pub(crate) String);

/// A value under its key, or an element of the list under it.
#[derive(Clone, Copy)]
struct Node<'a> {
    key: &'a Spanned<DeString<'a>>,
    value: &'a Spanned<DeValue<'a>>,
    /// Steps from the root: 1 for a section.
    depth: usize,
    /// Within a [`Many`] or a [`Word`].
    is_lenient: bool,
}

impl<'a> Node<'a> {
    fn read<S: DeserializeSeed<'a>>(self, seed: S) -> Result<S::Value, Wrong> {
        seed.deserialize(self).map_err(|wrong| {
            let element = wrong.element.and_then(|at| self.value.get_ref().get(at));
            wrong.under(self.key.get_ref(), element.unwrap_or(self.value).span())
        })
    }

    /// Fault at the key.
    fn wrong_key<T>(self, message: String) -> Result<T, Wrong> {
        Err(Wrong::bare(message).at(self.key.span()))
    }

    fn elements(self, list: &'a [Spanned<DeValue<'a>>]) -> Nodes<'a> {
        let element = |value| Node {
            value,
            depth: self.depth + 1,
            ..self
        };
        Nodes(
            list.iter()
                .map(element)
                .collect::<Vec<_>>()
                .into_iter()
                .peekable(),
        )
    }

    /// Values of a table, in order of the file.
    fn entries(self, table: &'a DeTable<'a>) -> Nodes<'a> {
        let entry = |(key, value)| Node {
            key,
            value,
            depth: self.depth + 1,
            is_lenient: false,
        };
        let mut entries: Vec<Node<'_>> = table.iter().map(entry).collect();
        entries.sort_by_key(|node| node.key.span().start);
        Nodes(entries.into_iter().peekable())
    }
}

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value.get_ref() {
            DeValue::String(text) => visitor.visit_str(text),
            DeValue::Integer(number) => {
                let number = i128::from_str_radix(number.as_str(), number.radix());
                let number = number.unwrap_or(i128::MAX);
                match i64::try_from(number) {
                    _ if self.is_lenient => visitor.visit_string(number.to_string()),
                    Ok(number) => visitor.visit_i64(number),
                    Err(_) => visitor.visit_i128(number),
                }
            }
            DeValue::Float(number) => {
                visitor.visit_f64(number.as_str().parse().unwrap_or(f64::NAN))
            }
            DeValue::Boolean(is) => visitor.visit_bool(*is),
            DeValue::Datetime(_) => Err(serde::de::Error::invalid_type(
                Unexpected::Other(DATETIME),
                &visitor,
            )),
            DeValue::Array(list) => visitor.visit_seq(self.elements(list)),
            DeValue::Table(table) => visitor.visit_map(self.entries(table)),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let key = self.key.get_ref();
        match self.value.get_ref() {
            DeValue::Array(_) => self.deserialize_any(visitor),
            _ if self.is_lenient => {
                visitor.visit_seq(self.elements(std::slice::from_ref(self.value)))
            }
            _ if self.depth == 1 => self.wrong_key(format!(
                "{key} has to be written as [[{key}]], once for each"
            )),
            _ => self.deserialize_any(visitor),
        }
    }

    /// A table of that title, without other keys than these.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        title: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        let DeValue::Table(table) = self.value.get_ref() else {
            return self.wrong_key(format!("{} has to be a table, {title}", self.key.get_ref()));
        };
        let entries = self.entries(table);
        for Node { key, .. } in entries.0.clone() {
            let name = key.get_ref();
            if !known.contains(&name.as_ref()) {
                let message = format!("unknown key \"{}\" in {title}", name.escape_debug());
                return Err(Wrong::new(message, meant(name, known)).at(key.span()));
            }
        }
        let read = visitor.visit_map(entries);
        read.map_err(|wrong| wrong.under(title, self.value.span()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        visitor.visit_enum(String::deserialize(self)?.into_deserializer())
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        let is_lenient = name == LENIENT;
        visitor.visit_newtype_struct(Node { is_lenient, ..self })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map identifier ignored_any
    }
}

/// Name by which [`Many`] and [`Word`] tell that they are read.
const LENIENT: &str = "$lenient";

/// TOML's type that serde has not.
const DATETIME: &str = "datetime";

/// Values that come one after another.
struct Nodes<'a>(Peekable<IntoIter<Node<'a>>>);

impl<'de> MapAccess<'de> for Nodes<'de> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Wrong> {
        let key = self.0.peek().map(|node| node.key.get_ref().as_ref());
        key.map(|key: &str| seed.deserialize(key.into_deserializer()))
            .transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Wrong> {
        self.0.next().expect("its key came before").read(seed)
    }
}

impl<'de> SeqAccess<'de> for Nodes<'de> {
    type Error = Wrong;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Wrong> {
        self.0.next().map(|node| node.read(seed)).transpose()
    }
}

/// Fault of a word that is none of `known`.
pub(crate) fn no_such_word(word: &str, known: &[&str]) -> Wrong {
    Wrong::new(
        format!("cannot be \"{}\"", word.escape_debug()),
        meant(word, known),
    )
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
