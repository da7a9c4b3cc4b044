//! Lists with pages, selectors and old revisions.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

use crate::cause::Cause;
use crate::kind::Kind;
use crate::render::{self, RenderedObject};
use crate::request::{ApiRequest, View, parse_version};
use crate::selectors::Selector;
use crate::server::{Answer, ApiServer};
use crate::status::{Failure, Outcome, respond};
use crate::store;

/// Content of a continue token.
#[derive(Serialize, Deserialize)]
struct ContinueToken {
    v: String,
    /// Revision of the list, or -1 for the newest.
    rv: i64,
    start: String,
}

impl ContinueToken {
    fn encode(rv: i64, start: &str) -> String {
        let token = Self {
            v: "meta.k8s.io/v1".to_owned(),
            rv,
            start: start.to_owned(),
        };
        URL_SAFE_NO_PAD.encode(render::json_bytes(&token))
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
struct ListMetadata {
    #[serde(rename = "resourceVersion")]
    version: String,
    #[serde(rename = "continue", skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    #[serde(rename = "remainingItemCount", skip_serializing_if = "Option::is_none")]
    remaining: Option<usize>,
}

#[derive(Serialize)]
struct ListResponse<'a> {
    kind: &'a str,
    #[serde(rename = "apiVersion")]
    api_version: &'a str,
    metadata: ListMetadata,
    items: Option<Vec<RenderedObject<'a>>>,
}

/// A page of a list.
struct Page {
    objects: Vec<Arc<Value>>,
    /// Name after which the next page starts, and the number of further objects.
    next_page: Option<(String, usize)>,
}

/// Checks the combination of `resourceVersion`, `resourceVersionMatch`, `continue` and `sendInitialEvents`.
pub(crate) fn validate_options(request: &ApiRequest<'_>, is_watch: bool) -> Outcome<()> {
    let query = &request.query;
    let (version, version_match) = (
        query.get("resourceVersion"),
        query.get("resourceVersionMatch"),
    );
    let forbidden = |field: &str, problem: &str| {
        let cause = Cause::forbidden(field, problem);
        Err(Failure::invalid_options("ListOptions", &[cause]))
    };
    let initial_events = query.get("sendInitialEvents");
    if is_watch && !initial_events.is_empty() {
        return match version_match {
            "NotOlderThan" => Ok(()),
            value => {
                let field = "resourceVersionMatch";
                let problem =
                    "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
                let mut causes = vec![Cause::forbidden(field, problem)];
                if !value.is_empty() {
                    let value = format!("{value:?}");
                    causes.push(Cause::unsupported(field, value, "\"NotOlderThan\""));
                }
                Err(Failure::invalid_options("ListOptions", &causes))
            }
        };
    }
    if !initial_events.is_empty() {
        return forbidden(
            "sendInitialEvents",
            "sendInitialEvents is forbidden for list",
        );
    }
    match version_match {
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
            let supported = r#""Exact", "NotOlderThan", """#;
            let other = format!("{other:?}");
            let cause = Cause::unsupported("resourceVersionMatch", other, supported);
            Err(Failure::invalid_options("ListOptions", &[cause]))
        }
    }
}

impl ApiServer {
    pub(crate) fn list(
        &self,
        request: &ApiRequest<'_>,
        kind: &Kind,
        namespace: &str,
    ) -> Outcome<Answer> {
        validate_options(request, false)?;
        let view = request.list_view(&kind.list_kind)?;
        let query = &request.query;
        let selector =
            Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
        let mut limit = query.number("limit")?.unwrap_or(0);
        let prefix = store::prefix(kind.stored_group(), &kind.resource, namespace);
        let current = self.store.revision();
        let (mut revision, mut start) = (current, prefix.clone());
        let token = query.get("continue");
        if token.is_empty() {
            let requested = query.get("resourceVersion");
            match requested {
                "" => {}
                // The watch cache ignores the limit.
                "0" => limit = 0,
                _ => {
                    let requested = parse_version(requested)?;
                    if requested > current {
                        return Err(Failure::too_large_version(requested, current));
                    }
                    let version_match = query.get("resourceVersionMatch");
                    if version_match == "Exact" || (version_match.is_empty() && limit > 0) {
                        revision = requested;
                    }
                }
            }
            if revision < self.store.compacted_revision() {
                let message = "The resourceVersion for the provided list is too old.";
                return Err(Failure::expired(message));
            }
        } else {
            if !matches!(query.get("resourceVersion"), "" | "0") {
                let message = "specifying resource version is not allowed when using continue";
                return Err(Failure::bad_request(message));
            }
            let token = ContinueToken::parse(token)?;
            if token.rv >= 0 {
                revision = token.rv.unsigned_abs();
                if revision < self.store.compacted_revision() || revision > current {
                    return Err(Failure::expired_token(&ContinueToken::encode(
                        -1,
                        &token.start,
                    )));
                }
            }
            start.push_str(&token.start);
        }
        let page = self.page(&prefix, &start, revision, limit, &selector);
        let token_revision = i64::try_from(revision).unwrap_or(i64::MAX);
        let next = page
            .next_page
            .as_ref()
            .map(|(last_name, _)| ContinueToken::encode(token_revision, last_name));
        let metadata = ListMetadata {
            version: revision.to_string(),
            // A list of custom resources always has the field.
            next: next.or_else(|| (kind.is_custom() && view == View::Full).then(String::new)),
            remaining: page
                .next_page
                .filter(|_| selector.is_empty())
                .map(|(_, count)| count),
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
            let objects = self.store.scan_at(prefix, start, revision);
            return take_page(objects.iter(), prefix, limit, selector);
        }
        let objects = self.store.scan(prefix, start);
        take_page(
            objects.map(|(_, entry)| &entry.value),
            prefix,
            limit,
            selector,
        )
    }
}

fn take_page<'a>(
    mut all: impl Iterator<Item = &'a Arc<Value>>,
    prefix: &str,
    limit: u64,
    selector: &Selector,
) -> Page {
    let mut objects: Vec<Arc<Value>> = Vec::new();
    for object in all.by_ref() {
        if !selector.matches(object) {
            continue;
        }
        objects.push(object.clone());
        if limit > 0 && objects.len() as u64 >= limit {
            break;
        }
    }
    let remaining = all.count();
    let last = objects.last().filter(|_| remaining > 0);
    let next_page = last.map(|last| {
        let (namespace, name) = (
            crate::meta::text(last, "namespace"),
            crate::meta::name(last),
        );
        let spans_namespaces = prefix.matches('/').count() < 3;
        let start = match namespace {
            "" => format!("{name}\u{0}"),
            namespace if spans_namespaces => format!("{namespace}/{name}\u{0}"),
            _ => format!("{name}\u{0}"),
        };
        (start, remaining)
    });
    Page { objects, next_page }
}

fn render_list(kind: &Kind, view: View, metadata: ListMetadata, objects: &[Arc<Value>]) -> Answer {
    let api_version = kind.api_version();
    let (list, api_version, omits_type) = match view {
        View::Full => (&*kind.list_kind, &*api_version, !kind.is_custom()),
        View::Metadata => ("PartialObjectMetadataList", "meta.k8s.io/v1", false),
    };
    let items = objects.iter().map(|object| RenderedObject {
        object,
        kind,
        view,
        omits_type,
        version: None,
    });
    let list = ListResponse {
        kind: list,
        api_version,
        metadata,
        // The real server converts an empty list to metadata without items.
        items: (!objects.is_empty() || view == View::Full).then(|| items.collect()),
    };
    Answer::Complete(respond(200, "application/json", render::json_bytes(&list)))
}
