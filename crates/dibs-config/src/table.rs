//! The file's TOML as serde reads it, where every fault has a place, the key it is under, and a hint.

use std::fmt;
use std::iter::Peekable;
use std::ops::Range;
use std::vec::IntoIter;

use dibs_settings::{Wrong, meant, no_such_word};
use serde::Deserialize;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::error::{Error, Invalid};

type Span = Range<usize>;

/// Fault of a value that is read.
#[derive(Debug)]
pub(crate) struct Fault {
    wrong: Wrong,
    /// Index of the element at fault, in a list.
    element: Option<usize>,
    /// Place, from where on the message is a whole sentence.
    place: Option<Span>,
}

impl Fault {
    fn at(message: String, hint: Option<String>, place: Span) -> Self {
        Fault {
            wrong: Wrong { message, hint },
            element: None,
            place: Some(place),
        }
    }

    /// The same, placed and with its subject, unless it has them.
    fn under(self, subject: &str, place: Span) -> Self {
        let Wrong { message, hint } = &self.wrong;
        match self.place {
            Some(_) => self,
            None => Fault::at(format!("{subject} {message}"), hint.clone(), place),
        }
    }
}

impl From<Wrong> for Fault {
    fn from(wrong: Wrong) -> Self {
        Fault {
            wrong,
            element: None,
            place: None,
        }
    }
}

/// A fault, of an element of a list if one is named, as serde carries it: by its text alone.
pub(crate) fn fault<E: serde::de::Error>(wrong: Wrong, element: Option<usize>) -> E {
    let Wrong { message, hint } = wrong;
    let element = element.map(|index| index.to_string());
    let [hint, element] = [hint, element].map(Option::unwrap_or_default);
    E::custom(format_args!("{message}\n{hint}\n{element}"))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.wrong.fmt(f)
    }
}

impl std::error::Error for Fault {}

impl serde::de::Error for Fault {
    /// Reads what [`fault`] wrote.
    fn custom<T: fmt::Display>(text: T) -> Self {
        let text = text.to_string();
        let mut lines = text.split('\n').map(str::to_owned);
        let message = lines.next().unwrap_or_default();
        let hint = lines.next().filter(|hint| !hint.is_empty());
        let element = lines.next().and_then(|index| index.parse().ok());
        Fault {
            element,
            ..Wrong { message, hint }.into()
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
            "a map" => "a table",
            "i128" => "a whole number",
            "f64" => "a number",
            _ => "a string",
        };
        Wrong::bare(format!("is {found}, but has to be {wanted}")).into()
    }

    fn unknown_variant(word: &str, known: &'static [&'static str]) -> Self {
        no_such_word(word, known).into()
    }

    fn missing_field(key: &'static str) -> Self {
        Wrong::new(
            format!("lacks \"{key}\""),
            "dibsd.toml(5) has an example of each key",
        )
        .into()
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
        T::deserialize(root).map_err(|fault| {
            let place = fault.place.unwrap_or(0..0);
            self.error(place, fault.wrong.message, fault.wrong.hint)
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
    fn read<S: DeserializeSeed<'a>>(self, seed: S) -> Result<S::Value, Fault> {
        seed.deserialize(self).map_err(|fault| {
            let element = fault.element.and_then(|at| self.value.get_ref().get(at));
            fault.under(self.key.get_ref(), element.unwrap_or(self.value).span())
        })
    }

    /// Fault at the key.
    fn wrong_key<T>(self, message: String) -> Result<T, Fault> {
        Err(Fault::at(message, None, self.key.span()))
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
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
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

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
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
    ) -> Result<V::Value, Fault> {
        let DeValue::Table(table) = self.value.get_ref() else {
            return self.wrong_key(format!("{} has to be a table, {title}", self.key.get_ref()));
        };
        let entries = self.entries(table);
        for Node { key, .. } in entries.0.clone() {
            let name = key.get_ref();
            if !known.contains(&name.as_ref()) {
                let message = format!("unknown key \"{}\" in {title}", name.escape_debug());
                return Err(Fault::at(message, Some(meant(name, known)), key.span()));
            }
        }
        let read = visitor.visit_map(entries);
        read.map_err(|fault| fault.under(title, self.value.span()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_enum(String::deserialize(self)?.into_deserializer())
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let is_lenient = name == LENIENT;
        visitor.visit_newtype_struct(Node { is_lenient, ..self })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
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
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Fault> {
        let key = self.0.peek().map(|node| node.key.get_ref().as_ref());
        key.map(|key: &str| seed.deserialize(key.into_deserializer()))
            .transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Fault> {
        self.0.next().expect("its key came before").read(seed)
    }
}

impl<'de> SeqAccess<'de> for Nodes<'de> {
    type Error = Fault;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Fault> {
        self.0.next().map(|node| node.read(seed)).transpose()
    }
}
