//! Parses requests: path, query, headers and body.

use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use jiff::Timestamp;
use serde_json::Value;

use crate::cause::Cause;
use crate::status::{Failure, Outcome};

/// Form of the objects in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Full,
    Metadata,
}

/// A request in parsed form.
#[derive(Debug)]
pub(crate) struct ApiRequest<'a> {
    pub(crate) now: Timestamp,
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) segments: Vec<&'a str>,
    pub(crate) query: Query,
    pub(crate) accept: &'a str,
    pub(crate) content_type: &'a str,
    pub(crate) user_agent: &'a str,
    pub(crate) body: &'a Bytes,
}

#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    fn parse(query: &str) -> Self {
        let pairs = form_urlencoded::parse(query.as_bytes());
        Self(pairs.into_owned().collect())
    }

    /// Returns a parameter, or an empty string.
    pub(crate) fn get(&self, name: &str) -> &str {
        let parameter = self.0.iter().find(|(key, _)| key == name);
        parameter.map_or("", |(_, value)| value)
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
}

/// Parses a `resourceVersion`.
pub(crate) fn parse_version(text: &str) -> Outcome<u64> {
    text.parse().map_err(|_| {
        Failure::bad_request(format!(
            "invalid resource version: resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: \
             invalid syntax"
        ))
    })
}

fn header_text(headers: &HeaderMap, name: header::HeaderName) -> &str {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

impl<'a> ApiRequest<'a> {
    pub(crate) fn parse(now: Timestamp, request: &'a Request<Bytes>) -> Self {
        let path = request.uri().path();
        let headers = request.headers();
        Self {
            now,
            method: request.method(),
            path,
            segments: path.split('/').filter(|part| !part.is_empty()).collect(),
            query: Query::parse(request.uri().query().unwrap_or_default()),
            accept: header_text(headers, header::ACCEPT),
            content_type: header_text(headers, header::CONTENT_TYPE),
            user_agent: header_text(headers, header::USER_AGENT),
            body: request.body(),
        }
    }

    /// Returns the view of one object.
    pub(crate) fn view(&self) -> Outcome<View> {
        match self.preferred_view()? {
            (_, "PartialObjectMetadataList") => {
                Err(Failure::not_modelled("one object as a list of metadata"))
            }
            (view, _) => Ok(view),
        }
    }

    /// Returns the view of a list.
    pub(crate) fn list_view(&self, list: &str) -> Outcome<View> {
        match self.preferred_view()? {
            (_, "PartialObjectMetadata") => {
                let message = format!(
                    "you requested PartialObjectMetadata, but the requested object is a list (*core.{list})"
                );
                Err(Failure::new(406, "NotAcceptable", message, Value::Null))
            }
            (view, _) => Ok(view),
        }
    }

    /// Returns the view of a watch, which sends single objects.
    pub(crate) fn watch_view(&self) -> Outcome<View> {
        self.preferred_view().map(|(view, _)| view)
    }

    fn preferred_view(&self) -> Outcome<(View, &str)> {
        for accepted in self.accept.split(',').map(str::trim) {
            let mut parameters = accepted.split(';').map(str::trim);
            let media_type = parameters.next().unwrap_or_default();
            if !matches!(
                media_type,
                "" | "*/*" | "application/*" | "application/json"
            ) {
                continue;
            }
            match parameters.find_map(|part| part.strip_prefix("as=")) {
                None => return Ok((View::Full, "")),
                Some(metadata_form @ ("PartialObjectMetadata" | "PartialObjectMetadataList")) => {
                    return Ok((View::Metadata, metadata_form));
                }
                Some(_) => {}
            }
        }
        let modelled = ["as=", "yaml", "protobuf", "cbor"];
        match modelled.iter().any(|part| self.accept.contains(part)) {
            true => Err(Failure::not_modelled(format_args!(
                "responses of the type {:?}",
                self.accept
            ))),
            false => Err(Failure::not_acceptable(self.query.is_true("watch"))),
        }
    }

    /// Returns the body of an apply patch.
    pub(crate) fn configuration(&self) -> Outcome<Value> {
        serde_json::from_slice(self.body)
            .map_err(|_| Failure::not_modelled("apply patches in YAML that is not JSON"))
    }

    /// Returns the body of a POST or PUT.
    pub(crate) fn parse_object(&self, kind: &str) -> Outcome<Value> {
        self.parse_body().map_err(|problem| {
            Failure::bad_request(format!(
                "the object provided is unrecognized (must be of type {kind}): {problem}"
            ))
        })
    }

    /// Returns the body of a DELETE.
    pub(crate) fn parse_delete_options(&self) -> Outcome<Value> {
        if self.body.is_empty() {
            return Ok(Value::Object(serde_json::Map::new()));
        }
        let options = self.parse_body().map_err(|problem| {
            let text = problem
                .rsplit_once(" (")
                .map_or(&*problem, |(text, _)| text);
            Failure::bad_request(text)
        })?;
        match options["kind"].as_str().unwrap_or("DeleteOptions") {
            "DeleteOptions" => Ok(options),
            kind => {
                let version = options["apiVersion"].as_str().unwrap_or_default();
                Err(Failure::bad_request(format!(
                    "no kind {kind:?} is registered for version {version:?} in scheme \"pkg/runtime/scheme.go:111\""
                )))
            }
        }
    }

    fn parse_body(&self) -> Result<Value, String> {
        let prefix = "couldn't get version/kind; json parse error:";
        let value: Value = serde_json::from_slice(self.body).map_err(|error| {
            let body = match self.body.is_empty() {
                true => "<empty>".into(),
                false => String::from_utf8_lossy(self.body),
            };
            format!("{prefix} {} ({body})", go_error(&error))
        })?;
        if value.is_object() {
            return Ok(value);
        }
        let body: String = self.body.iter().map(|byte| format!("{byte:02x}")).collect();
        let go_target = r#"struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" }"#;
        Err(format!(
            "{prefix} json: cannot unmarshal {} into Go value of type {go_target} ({body})",
            go_type(&value)
        ))
    }

    /// Returns the content type without its parameters.
    pub(crate) fn media_type(&self) -> &str {
        let media_type = self.content_type.split(';').next();
        media_type.unwrap_or_default().trim()
    }

    /// Fails for a media type that the model doesn't read.
    pub(crate) fn check_content_type(&self) -> Outcome<()> {
        let content_type = self.media_type();
        match content_type {
            "" | "application/json" => Ok(()),
            "application/yaml" | "application/vnd.kubernetes.protobuf" | "application/cbor" => Err(
                Failure::not_modelled(format_args!("bodies of the type {content_type:?}")),
            ),
            _ => Err(Failure::unsupported_media_type(
                "application/json, application/yaml, application/vnd.kubernetes.protobuf",
            )),
        }
    }

    /// Checks the parameters of a write. `options` is the name of their type.
    pub(crate) fn check_options(&self, options: &str) -> Outcome<()> {
        let unsupported = |field: &str, value: String, supported: &str| {
            let cause = Cause::unsupported(field, value, supported);
            Err(Failure::invalid_options(options, &[cause]))
        };
        let manager = self.query.get("fieldManager");
        let is_control = |(_, character): &(usize, char)| character.is_control();
        if let Some((position, character)) = manager.chars().enumerate().find(is_control) {
            let code = u32::from(character);
            let problem = format!("invalid character U+{code:04X} (at position {position})");
            let cause = Cause::invalid("fieldManager", &manager.into(), &problem);
            return Err(Failure::invalid_options(options, &[cause]));
        }
        if manager.len() > 128 {
            let cause = Cause {
                reason: "FieldValueTooLong",
                message: "Too long: may not be more than 128 bytes".to_owned(),
                field: "fieldManager".to_owned(),
            };
            return Err(Failure::invalid_options(options, &[cause]));
        }
        match self.query.get("dryRun") {
            "" | "All" => {}
            other => return unsupported("dryRun", format!("[{other:?}]"), "\"All\""),
        }
        match self.query.get("fieldValidation") {
            "" | "Ignore" | "Strict" | "Warn" => Ok(()),
            other => unsupported(
                "fieldValidation",
                format!("{other:?}"),
                r#""", "Ignore", "Strict", "Warn""#,
            ),
        }
    }

    pub(crate) fn dry_run(&self) -> bool {
        self.query.get("dryRun") == "All"
    }

    /// Returns the field manager: the parameter, or the first part of the user agent.
    pub(crate) fn field_manager(&self) -> String {
        let product = self.user_agent.split('/').next().unwrap_or_default();
        let manager = match self.query.get("fieldManager") {
            "" if product.is_empty() => "unknown",
            "" => product,
            manager => manager,
        };
        manager.chars().take(128).collect()
    }
}

/// Returns the text of Go's decoder for a syntax error.
pub(crate) fn go_error(error: &serde_json::Error) -> String {
    match error.is_eof() {
        true => "unexpected end of JSON input".to_owned(),
        false => error.to_string(),
    }
}

/// Returns Go's name for the type of a JSON value.
pub(crate) fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
