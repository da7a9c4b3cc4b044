//! Record of the desired state on the member.
//!
//! The reconciler writes it before it acts, so it never acts on an older state, regardless of the hub. The anchor owns
//! the record. Without an anchor, the record is written too.

pub mod anchor;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;

use self::anchor::Bookkeeping;

/// Name of the record. It is a Secret, since values may be secret.
pub const RECORD_NAME: &str = "krypton-desired-state";
pub(crate) const KEY: &str = "desired.json";
const READING: &str = "reading Secret krypton-system/krypton-desired-state";
const WRITING: &str = "writing Secret krypton-system/krypton-desired-state";

#[derive(Debug, Error)]
pub enum RecordError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the desired state cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
}

impl RecordError {
    /// Returns true for an error that may be transient. A missing permission is not.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Api(error) => !matches!(error.code(), Some(401 | 403)),
            Self::Encode(_) => false,
        }
    }
}

/// Action for a received desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advance {
    /// The record already contains it.
    Recorded,
    Record,
    /// The member has seen this later version.
    Refuse(Version),
}

/// Compares the versions. An equal version with other content counts as older, since two hubs that disagree must not
/// alternate.
pub fn advance(record: Option<&DesiredState>, incoming: &DesiredState) -> Advance {
    match record {
        None => Advance::Record,
        Some(record) if record.version > incoming.version => Advance::Refuse(record.version),
        Some(record) if record.version < incoming.version => Advance::Record,
        Some(record) if record.digest() == incoming.digest() => Advance::Recorded,
        Some(record) => Advance::Refuse(record.version),
    }
}

/// Result of recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    pub advance: Advance,
    /// Reason why the anchor does not own the record. It blocks nothing. The next desired state and the next start
    /// retry it.
    pub unowned: Option<String>,
}

/// Records `incoming` if it is newer, makes the anchor its owner, and returns the result.
pub async fn record(client: &Client, incoming: &DesiredState) -> Result<Recording, RecordError> {
    let (owner, unowned) = match anchor::owns(Bookkeeping::DesiredState) {
        true => match anchor::ensure(client).await {
            Ok(owner) => (Some(owner), None),
            Err(error) => (None, Some(chain(&error))),
        },
        false => (None, None),
    };
    let recorded = record_now(client, incoming, owner.as_ref()).await?;
    Ok(Recording {
        unowned: unowned.or(recorded.unowned),
        ..recorded
    })
}

async fn record_now(
    client: &Client,
    incoming: &DesiredState,
    owner: Option<&OwnerReference>,
) -> Result<Recording, RecordError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let secret = call(READING, api.get_opt(RECORD_NAME)).await?;
    let record = secret.as_ref().and_then(read);
    let advance = advance(record.as_ref(), incoming);
    let metadata = secret.as_ref().map(|secret| &secret.metadata);
    let before = metadata
        .and_then(|metadata| metadata.owner_references.clone())
        .unwrap_or_default();
    let owners = owner.map_or_else(|| before.clone(), |owner| anchor::owners(&before, owner));
    let due = match advance {
        Advance::Record => true,
        Advance::Recorded => owners != before,
        Advance::Refuse(_) => false,
    };
    if !due {
        return Ok(Recording {
            advance,
            unowned: None,
        });
    }
    let content = serde_json::to_vec(incoming).map_err(RecordError::Encode)?;
    let next = Secret {
        data: Some([(KEY.to_owned(), ByteString(content))].into()),
        ..secret.clone().unwrap_or_else(|| Secret {
            metadata: ObjectMeta {
                name: Some(RECORD_NAME.to_owned()),
                ..ObjectMeta::default()
            },
            ..Secret::default()
        })
    };
    // Some clusters reject an owner reference from a client that may not delete the owned object.
    let mut unowned = None;
    for owners in [&owners, &before] {
        let mut next = next.clone();
        next.metadata.owner_references = (!owners.is_empty()).then(|| owners.clone());
        let params = PostParams::default();
        // The resourceVersion of the read lets one of several concurrent writers win. The others read again.
        let writing = async {
            match secret.is_some() {
                true => api.replace(RECORD_NAME, &params, &next).await,
                false => api.create(&params, &next).await,
            }
        };
        let Err(error) = call(WRITING, writing).await else {
            break;
        };
        // The state is recorded, with or without its owner.
        if advance == Advance::Recorded {
            unowned = Some(chain(&error));
            break;
        }
        match error.status() {
            Some(status) if status.code == 403 && *owners != before => {
                unowned = Some(status.message.clone());
            }
            _ => return Err(error.into()),
        }
    }
    Ok(Recording { advance, unowned })
}

/// Returns the state that was last acted on. A new process starts with it.
pub async fn read_record(client: &Client) -> Result<Option<DesiredState>, RecordError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let secret = call(READING, api.get_opt(RECORD_NAME)).await?;
    Ok(secret.as_ref().and_then(read))
}

/// Parses the record. An unreadable record counts as missing, and the next desired state overwrites it.
pub fn read(secret: &Secret) -> Option<DesiredState> {
    serde_json::from_slice(&secret.data.as_ref()?.get(KEY)?.0).ok()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use krypton_types::desired::ChartState;
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    fn desired(epoch: u64, generation: u64, chart: &str) -> DesiredState {
        DesiredState {
            version: Version { epoch, generation },
            chart: ChartState {
                repo: "https://example.org".to_owned(),
                name: chart.to_owned(),
                version: "1.0.0".to_owned(),
                ..ChartState::default()
            },
            ..DesiredState::default()
        }
    }

    #[test]
    fn an_older_desired_state_is_never_acted_on() {
        let record = desired(2, 5, "a");
        assert_eq!(advance(None, &record), Advance::Record);
        assert_eq!(
            advance(Some(&record), &desired(2, 5, "a")),
            Advance::Recorded
        );
        assert_eq!(advance(Some(&record), &desired(2, 6, "b")), Advance::Record);
        assert_eq!(advance(Some(&record), &desired(3, 1, "b")), Advance::Record);
        let refused = Advance::Refuse(record.version);
        assert_eq!(advance(Some(&record), &desired(2, 4, "b")), refused);
        assert_eq!(advance(Some(&record), &desired(1, 9, "b")), refused);
        assert_eq!(advance(Some(&record), &desired(2, 5, "b")), refused);
    }

    /// Log of the requests: method with last path segment, and body.
    type Asked = Arc<Mutex<Vec<(String, serde_json::Value)>>>;

    fn server(answer: fn(&str, &serde_json::Value) -> u16) -> (Client, Asked) {
        let asked = Asked::default();
        let log = Arc::clone(&asked);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let log = Arc::clone(&log);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap_or_default();
                let sent: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
                let what = parts.uri.path().rsplit('/').next().unwrap_or_default();
                let what = format!("{} {what}", parts.method);
                let code = answer(&what, &sent);
                let mut object = sent.clone();
                if code == 200 {
                    object["metadata"]["uid"] = json!("uid");
                } else {
                    let reason = if code == 404 { "NotFound" } else { "Forbidden" };
                    object = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "code": code, "message": "refused", "reason": reason});
                }
                log.lock().unwrap().push((what, sent));
                let mut response = http::Response::new(Body::from(object.to_string().into_bytes()));
                *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        (Client::new(service, "default"), asked)
    }

    fn owners_written(asked: &Asked) -> Vec<usize> {
        let asked = asked.lock().unwrap();
        let writes = asked.iter().filter(|(what, _)| what == "POST secrets");
        let owners = writes.map(|(_, sent)| {
            sent["metadata"]["ownerReferences"]
                .as_array()
                .map_or(0, Vec::len)
        });
        owners.collect()
    }

    #[tokio::test]
    async fn missing_owner_rights_do_not_prevent_recording() {
        let wanted = desired(1, 1, "a");
        let (client, asked) = server(|what, _| match what {
            "GET krypton-root-owner" | "GET krypton-desired-state" => 404,
            _ => 200,
        });
        let done = record(&client, &wanted).await.unwrap();
        assert_eq!((done.advance, done.unowned), (Advance::Record, None));
        assert_eq!(owners_written(&asked), [1]);

        let (client, asked) = server(|what, _| match what {
            "GET krypton-root-owner" => 403,
            "GET krypton-desired-state" => 404,
            _ => 200,
        });
        let done = record(&client, &wanted).await.unwrap();
        assert_eq!(done.advance, Advance::Record);
        assert!(done.unowned.unwrap().contains("refused"));
        assert_eq!(owners_written(&asked), [0]);

        // This API server rejects an owner reference from a client that may not delete the owned object.
        let (client, asked) = server(|what, sent| match what {
            "GET krypton-root-owner" | "GET krypton-desired-state" => 404,
            "POST secrets" if sent["metadata"]["ownerReferences"].is_array() => 403,
            _ => 200,
        });
        let done = record(&client, &wanted).await.unwrap();
        assert_eq!(done.advance, Advance::Record);
        assert_eq!(done.unowned.as_deref(), Some("refused"));
        assert_eq!(owners_written(&asked), [1, 0]);

        let (client, asked) = server(|what, _| match what {
            "GET krypton-root-owner" | "GET krypton-desired-state" => 404,
            "POST secrets" => 403,
            _ => 200,
        });
        let refused = record(&client, &wanted).await;
        let error = refused.unwrap_err();
        assert!(chain(&error).starts_with(WRITING), "{error:?}");
        assert_eq!(owners_written(&asked), [1, 0]);
    }
}
