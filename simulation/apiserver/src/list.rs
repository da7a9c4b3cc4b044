//! Lists with pages, selectors and old revisions.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

use crate::render::{self, Rendered};
use crate::request::{Call, View};
use crate::resources::Kind;
use crate::selectors::Selector;
use crate::server::{Answer, ApiServer};
use crate::status::{Cause, Failure, Outcome, respond};
use crate::store;

/// Content of a continue token.
#[derive(Serialize, Deserialize)]
struct Token {
    v: String,
    /// Revision of the list, or -1 for the newest.
    rv: i64,
    start: String,
}

impl Token {
    fn encode(rv: i64, start: &str) -> String {
        let token = Self {
            v: "meta.k8s.io/v1".to_owned(),
            rv,
            start: start.to_owned(),
        };
        URL_SAFE_NO_PAD.encode(render::bytes(&token))
    }

    fn parse(text: &str) -> Outcome<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.trim_end_matches('='));
        let bytes = bytes.unwrap_or_default();
        serde_json::from_slice(&bytes).map_err(|_| {
            let problem = match bytes.first() {
                None => "unexpected end of JSON input".to_owned(),
                Some(first @ 0x20..0x7f) => format!(
                    "invalid character '{}' looking for beginning of value",
                    char::from(*first)
                ),
                Some(first) => {
                    format!("invalid character '\\u{first:04x}' looking for beginning of value")
                }
            };
            Failure::bad_request(format!(
                "invalid continue token: continue key is not valid: {problem}"
            ))
        })
    }
}

#[derive(Serialize)]
struct Metadata {
    #[serde(rename = "resourceVersion")]
    version: String,
    #[serde(rename = "continue", skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    #[serde(rename = "remainingItemCount", skip_serializing_if = "Option::is_none")]
    remaining: Option<usize>,
}

#[derive(Serialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(rename = "apiVersion")]
    api_version: &'a str,
    metadata: Metadata,
    items: Option<Vec<Rendered<'a>>>,
}

/// A page of a list.
struct Page {
    objects: Vec<Arc<Value>>,
    /// Name after which the next page starts, and the number of further objects.
    rest: Option<(String, usize)>,
}

/// Parses a `resourceVersion`.
pub(crate) fn version(text: &str) -> Outcome<u64> {
    text.parse().map_err(|_| {
        Failure::bad_request(format!(
            "invalid resource version: resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: \
             invalid syntax"
        ))
    })
}

/// Checks the combination of `resourceVersion`, `resourceVersionMatch`, `continue` and `sendInitialEvents`.
pub(crate) fn validate(call: &Call<'_>, is_watch: bool) -> Outcome<()> {
    let query = &call.query;
    let (version, matching) = (
        query.get("resourceVersion"),
        query.get("resourceVersionMatch"),
    );
    let forbidden = |field: &str, problem: &str| {
        let cause = Cause::forbidden(field, problem);
        Err(Failure::invalid_options("ListOptions", &[cause]))
    };
    let initial = query.get("sendInitialEvents");
    if is_watch && !initial.is_empty() {
        return match matching {
            "NotOlderThan" => Ok(()),
            found => {
                let field = "resourceVersionMatch";
                let problem =
                    "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
                let mut causes = vec![Cause::forbidden(field, problem)];
                if !found.is_empty() {
                    causes.push(Cause {
                        reason: "FieldValueNotSupported",
                        message: format!(
                            "Unsupported value: {found:?}: supported values: \"NotOlderThan\""
                        ),
                        field: field.to_owned(),
                    });
                }
                Err(Failure::invalid_options("ListOptions", &causes))
            }
        };
    }
    if !initial.is_empty() {
        return forbidden(
            "sendInitialEvents",
            "sendInitialEvents is forbidden for list",
        );
    }
    match matching {
        "" => Ok(()),
        _ if is_watch => forbidden(
            "resourceVersionMatch",
            "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
        ),
        _ if version.is_empty() => forbidden(
            "resourceVersionMatch",
            "resourceVersionMatch is forbidden unless resourceVersion is provided",
        ),
        _ if !query.get("continue").is_empty() => forbidden(
            "resourceVersionMatch",
            "resourceVersionMatch is forbidden when continue is provided",
        ),
        "Exact" if version == "0" => forbidden(
            "resourceVersionMatch",
            "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
        ),
        "Exact" | "NotOlderThan" => Ok(()),
        other => {
            let cause = Cause {
                reason: "FieldValueNotSupported",
                message: format!(
                    "Unsupported value: {other:?}: supported values: \"Exact\", \"NotOlderThan\", \"\""
                ),
                field: "resourceVersionMatch".to_owned(),
            };
            Err(Failure::invalid_options("ListOptions", &[cause]))
        }
    }
}

impl ApiServer {
    pub(crate) fn list(&self, call: &Call<'_>, kind: &Kind, namespace: &str) -> Outcome<Answer> {
        validate(call, false)?;
        let view = call.list_view(&kind.list)?;
        let query = &call.query;
        let selector =
            Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
        let mut limit = query.number("limit")?.unwrap_or(0);
        let prefix = store::prefix(kind.stored_group(), &kind.resource, namespace);
        let current = self.store.revision();
        let (mut revision, mut start) = (current, prefix.clone());
        let token = query.get("continue");
        if token.is_empty() {
            let asked = query.get("resourceVersion");
            match asked {
                "" => {}
                // The watch cache ignores the limit.
                "0" => limit = 0,
                _ => {
                    let asked = version(asked)?;
                    if asked > current {
                        return Err(Failure::too_large_version(asked, current));
                    }
                    let matching = query.get("resourceVersionMatch");
                    if matching == "Exact" || (matching.is_empty() && limit > 0) {
                        revision = asked;
                    }
                }
            }
            if revision < self.store.compacted() {
                let message = "The resourceVersion for the provided list is too old.";
                return Err(Failure::expired(message));
            }
        } else {
            if !matches!(query.get("resourceVersion"), "" | "0") {
                let message = "specifying resource version is not allowed when using continue";
                return Err(Failure::bad_request(message));
            }
            let token = Token::parse(token)?;
            if token.rv >= 0 {
                revision = token.rv.unsigned_abs();
                if revision < self.store.compacted() || revision > current {
                    return Err(Failure::expired_token(&Token::encode(-1, &token.start)));
                }
            }
            start.push_str(&token.start);
        }
        let page = self.page(&prefix, &start, revision, limit, &selector);
        let token_revision = i64::try_from(revision).unwrap_or(i64::MAX);
        let next = page
            .rest
            .as_ref()
            .map(|(after, _)| Token::encode(token_revision, after));
        let counted = page.rest.filter(|_| selector.is_empty());
        let metadata = Metadata {
            version: revision.to_string(),
            // A list of custom resources always has the field.
            next: next.or_else(|| (kind.is_custom() && view == View::Full).then(String::new)),
            remaining: counted.map(|(_, count)| count),
        };
        Ok(render_list(kind, view, metadata, &page.objects))
    }

    fn page(
        &self,
        prefix: &str,
        start: &str,
        revision: u64,
        limit: u64,
        selector: &Selector,
    ) -> Page {
        if revision < self.store.revision() {
            let rows = self.store.scan_at(prefix, start, revision);
            return page(rows.iter(), prefix, limit, selector);
        }
        let rows = self.store.scan(prefix, start);
        page(rows.map(|(_, entry)| &entry.value), prefix, limit, selector)
    }
}

fn page<'a>(
    mut rows: impl Iterator<Item = &'a Arc<Value>>,
    prefix: &str,
    limit: u64,
    selector: &Selector,
) -> Page {
    let mut objects: Vec<Arc<Value>> = Vec::new();
    for object in rows.by_ref() {
        if !selector.matches(object) {
            continue;
        }
        objects.push(object.clone());
        if limit > 0 && objects.len() as u64 >= limit {
            break;
        }
    }
    let remaining = rows.count();
    let last = objects.last().filter(|_| remaining > 0);
    let rest = last.map(|last| {
        let (namespace, name) = (
            crate::meta::text(last, "namespace"),
            crate::meta::name(last),
        );
        let is_whole = prefix.matches('/').count() < 3;
        let after = match namespace {
            "" => format!("{name}\u{0}"),
            namespace if is_whole => format!("{namespace}/{name}\u{0}"),
            _ => format!("{name}\u{0}"),
        };
        (after, remaining)
    });
    Page { objects, rest }
}

fn render_list(kind: &Kind, view: View, metadata: Metadata, objects: &[Arc<Value>]) -> Answer {
    let api_version = kind.api_version();
    let (list, api_version, bare) = match view {
        View::Full => (&*kind.list, &*api_version, !kind.is_custom()),
        View::Metadata => ("PartialObjectMetadataList", "meta.k8s.io/v1", false),
    };
    let items = objects.iter().map(|object| Rendered {
        object,
        kind,
        view,
        bare,
        version: None,
    });
    let list = List {
        kind: list,
        api_version,
        metadata,
        // The real server converts an empty list to metadata without items.
        items: (!objects.is_empty() || view == View::Full).then(|| items.collect()),
    };
    Answer::Complete(respond(200, "application/json", render::bytes(&list)))
}
