//! Parses requests: path, query, headers and body.

use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use jiff::Timestamp;
use serde_json::Value;

use crate::status::{Failure, Outcome};

/// Form of the objects in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Full,
    Metadata,
}

/// A request in parsed form.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) now: Timestamp,
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) segments: Vec<&'a str>,
    pub(crate) query: Query,
    pub(crate) accept: &'a str,
    pub(crate) content: &'a str,
    pub(crate) agent: &'a str,
    pub(crate) body: &'a Bytes,
}

#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    fn parse(query: &str) -> Self {
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        });
        Self(pairs.collect())
    }

    /// Returns a parameter, or an empty string.
    pub(crate) fn get(&self, name: &str) -> &str {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map_or("", |(_, value)| value)
    }

    pub(crate) fn is_true(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1")
    }

    pub(crate) fn number(&self, name: &str) -> Outcome<Option<u64>> {
        match self.get(name) {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|_| {
                Failure::bad_request(format!(
                    "strconv.ParseInt: parsing {text:?}: invalid syntax"
                ))
            }),
        }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits = [rest.next(), rest.next()];
                let digit = |digit: Option<u8>| char::from(digit?).to_digit(16);
                match digits.map(digit) {
                    [Some(high), Some(low)] => bytes.push((high * 16 + low) as u8),
                    _ => bytes.push(b'%'),
                }
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> &str {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

impl<'a> Call<'a> {
    pub(crate) fn parse(now: Timestamp, request: &'a Request<Bytes>) -> Self {
        let path = request.uri().path();
        let headers = request.headers();
        Self {
            now,
            method: request.method(),
            path,
            segments: path.split('/').filter(|part| !part.is_empty()).collect(),
            query: Query::parse(request.uri().query().unwrap_or_default()),
            accept: text(headers, header::ACCEPT),
            content: text(headers, header::CONTENT_TYPE),
            agent: text(headers, header::USER_AGENT),
            body: request.body(),
        }
    }

    pub(crate) fn view(&self) -> Outcome<View> {
        for accepted in self.accept.split(',').map(str::trim) {
            let mut parts = accepted.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            if !matches!(kind, "" | "*/*" | "application/*" | "application/json") {
                continue;
            }
            match parts.find_map(|part| part.strip_prefix("as=")) {
                None => return Ok(View::Full),
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => {
                    return Ok(View::Metadata);
                }
                Some(_) => {}
            }
        }
        Err(Failure::not_modelled(format_args!(
            "responses of the type {:?}",
            self.accept
        )))
    }

    pub(crate) fn json(&self) -> Outcome<Value> {
        serde_json::from_slice(self.body).map_err(|error| {
            Failure::bad_request(format!(
                "the object provided is unrecognized (must be of type Object): {error}"
            ))
        })
    }

    /// Returns the body of a POST or PUT.
    pub(crate) fn object(&self) -> Outcome<Value> {
        let content = self.content.split(';').next().unwrap_or_default();
        if !matches!(content, "" | "application/json") {
            return Err(Failure::not_modelled(format_args!(
                "bodies of the type {content:?}"
            )));
        }
        self.json()
    }

    pub(crate) fn dry_run(&self) -> Outcome<bool> {
        match self.query.get("dryRun") {
            "" => Ok(false),
            "All" => Ok(true),
            other => Err(Failure::not_modelled(format_args!("dryRun={other}"))),
        }
    }

    /// Returns the field manager: the parameter, or the first part of the user agent.
    pub(crate) fn manager(&self) -> String {
        let agent = self.agent.split('/').next().unwrap_or_default();
        let manager = match self.query.get("fieldManager") {
            "" if agent.is_empty() => "unknown",
            "" => agent,
            manager => manager,
        };
        manager.chars().take(128).collect()
    }
}
