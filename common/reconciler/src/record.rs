//! Record of the desired state on the member.
//!
//! The reconciler writes it before it acts, so it never acts on an older state, regardless of the hub. The anchor owns
//! the record. Without an anchor, the record is written too.

pub mod anchor;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;

/// Name of the record. It is a Secret, since values may be secret.
pub const RECORD_NAME: &str = "krypton-desired-state";
pub(crate) const RECORD_KEY: &str = "desired.json";
const READ_ATTEMPT: &str = "reading Secret krypton-system/krypton-desired-state";
const WRITE_ATTEMPT: &str = "writing Secret krypton-system/krypton-desired-state";

#[derive(Debug, Error)]
pub enum RecordError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the desired state cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
}

impl RecordError {
    /// Returns true for an error that may be transient. A missing permission is not.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Api(error) => !matches!(error.code(), Some(401 | 403)),
            Self::Encode(_) => false,
        }
    }
}

/// Action for a received desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordAction {
    /// The record already contains it.
    AlreadyRecorded,
    Record,
    /// The member has seen this later version.
    Reject(Version),
}

/// Compares the versions. An equal version with other content counts as older, since two hubs that disagree must not
/// alternate.
pub fn decide(record: Option<&DesiredState>, incoming: &DesiredState) -> RecordAction {
    match record {
        None => RecordAction::Record,
        Some(record) if record.version > incoming.version => RecordAction::Reject(record.version),
        Some(record) if record.version < incoming.version => RecordAction::Record,
        Some(record) if record.digest() == incoming.digest() => RecordAction::AlreadyRecorded,
        Some(record) => RecordAction::Reject(record.version),
    }
}

/// Result of recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordResult {
    pub action: RecordAction,
    /// Reason why the anchor does not own the record. It blocks nothing. The next desired state and the next start
    /// retry it.
    pub ownerless_reason: Option<String>,
}

/// Records `incoming` if it is newer, makes the anchor its owner, and returns the result.
pub async fn save(client: &Client, incoming: &DesiredState) -> Result<RecordResult, RecordError> {
    let (owner, ownerless_reason) = match anchor::ensure(client).await {
        Ok(owner) => (Some(owner), None),
        Err(error) => (None, Some(chain(&error))),
    };
    let recorded = write_record(client, incoming, owner.as_ref()).await?;
    Ok(RecordResult {
        ownerless_reason: ownerless_reason.or(recorded.ownerless_reason),
        ..recorded
    })
}

async fn write_record(
    client: &Client,
    incoming: &DesiredState,
    owner: Option<&OwnerReference>,
) -> Result<RecordResult, RecordError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let secret = call(READ_ATTEMPT, api.get_opt(RECORD_NAME)).await?;
    let record = secret.as_ref().and_then(parse);
    let action = decide(record.as_ref(), incoming);
    let metadata = secret.as_ref().map(|secret| &secret.metadata);
    let previous_owners = metadata
        .and_then(|metadata| metadata.owner_references.clone())
        .unwrap_or_default();
    let owners = match owner {
        Some(owner) => anchor::with_anchor(&previous_owners, owner),
        None => previous_owners.clone(),
    };
    let is_write_needed = match action {
        RecordAction::Record => true,
        RecordAction::AlreadyRecorded => owners != previous_owners,
        RecordAction::Reject(_) => false,
    };
    if !is_write_needed {
        return Ok(RecordResult {
            action,
            ownerless_reason: None,
        });
    }
    let content = serde_json::to_vec(incoming).map_err(RecordError::Encode)?;
    let mut next = secret.clone().unwrap_or_default();
    next.metadata.name = Some(RECORD_NAME.to_owned());
    next.data = Some([(RECORD_KEY.to_owned(), ByteString(content))].into());
    // Some clusters reject an owner reference from a client that may not delete the owned object.
    let mut ownerless_reason = None;
    for owners in [&owners, &previous_owners] {
        next.metadata.owner_references = (!owners.is_empty()).then(|| owners.clone());
        let params = PostParams::default();
        // The resourceVersion of the read lets one of several concurrent writers win. The others read again.
        let writing = async {
            match secret.is_some() {
                true => api.replace(RECORD_NAME, &params, &next).await,
                false => api.create(&params, &next).await,
            }
        };
        let Err(error) = call(WRITE_ATTEMPT, writing).await else {
            break;
        };
        // The state is recorded, with or without its owner.
        if action == RecordAction::AlreadyRecorded {
            ownerless_reason = Some(chain(&error));
            break;
        }
        match error.status() {
            Some(status) if status.code == 403 && *owners != previous_owners => {
                ownerless_reason = Some(status.message.clone());
            }
            _ => return Err(error.into()),
        }
    }
    Ok(RecordResult {
        action,
        ownerless_reason,
    })
}

/// Returns the state that was last acted on. A new process starts with it.
pub async fn read_record(client: &Client) -> Result<Option<DesiredState>, RecordError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let secret = call(READ_ATTEMPT, api.get_opt(RECORD_NAME)).await?;
    Ok(secret.as_ref().and_then(parse))
}

/// Parses the record. An unreadable record counts as missing, and the next desired state overwrites it.
pub fn parse(secret: &Secret) -> Option<DesiredState> {
    serde_json::from_slice(&secret.data.as_ref()?.get(RECORD_KEY)?.0).ok()
}

#[cfg(test)]
mod tests {
    use krypton_types::desired::ChartState;
    use serde_json::json;

    use super::*;
    use crate::stub_server::{ReceivedRequest, StubServer};

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
        let rejected = RecordAction::Reject(record.version);
        assert_eq!(decide(None, &record), RecordAction::Record);
        for (epoch, generation, chart, expected) in [
            (2, 5, "a", RecordAction::AlreadyRecorded),
            (2, 6, "b", RecordAction::Record),
            (3, 1, "b", RecordAction::Record),
            (2, 4, "b", rejected.clone()),
            (1, 9, "b", rejected.clone()),
            (2, 5, "b", rejected),
        ] {
            let action = decide(Some(&record), &desired(epoch, generation, chart));
            assert_eq!(action, expected, "{epoch}.{generation} {chart}");
        }
    }

    /// Saves to a server with these codes for a read of the anchor, and for a write of the record with and without an
    /// owner. Returns also the number of owners in each write.
    async fn save_to(
        [anchor, owned, ownerless]: [u16; 3],
    ) -> (Result<RecordResult, RecordError>, Vec<usize>) {
        let owner_count = |request: &ReceivedRequest| {
            let owners = request.body["metadata"]["ownerReferences"].as_array();
            owners.map_or(0, Vec::len)
        };
        let server = StubServer::start(move |request| {
            let code = match request.line().as_str() {
                "GET krypton-root-owner" => anchor,
                "GET krypton-desired-state" => 404,
                "POST secrets" if owner_count(request) > 0 => owned,
                "POST secrets" => ownerless,
                _ => 200,
            };
            let mut object = request.body.clone();
            object["metadata"]["uid"] = json!("uid");
            match code {
                200 => (200, object),
                code => (code, json!("refused")),
            }
        });
        let result = save(&server.client, &desired(1, 1, "a")).await;
        let requests = server.requests();
        let writes = requests
            .iter()
            .filter(|request| request.line() == "POST secrets");
        (result, writes.map(owner_count).collect())
    }

    #[tokio::test]
    async fn missing_owner_rights_do_not_prevent_recording() {
        for (codes, expected_reason, expected_owners) in [
            ([404, 200, 200], None, vec![1]),
            ([403, 200, 200], Some("reading ConfigMap"), vec![0]),
            // This API server rejects an owner reference from a client that may not delete the owned object.
            ([404, 403, 200], Some("refused"), vec![1, 0]),
        ] {
            let (result, owners) = save_to(codes).await;
            let result = result.unwrap();
            assert_eq!(result.action, RecordAction::Record, "{codes:?}");
            let reason = result.ownerless_reason;
            assert_eq!(reason.is_some(), expected_reason.is_some(), "{codes:?}");
            if let (Some(reason), Some(expected)) = (reason, expected_reason) {
                let is_expected = reason.starts_with(expected) && reason.contains("refused");
                assert!(is_expected, "{reason}");
            }
            assert_eq!(owners, expected_owners, "{codes:?}");
        }
        let (result, owners) = save_to([404, 403, 403]).await;
        let error = result.unwrap_err();
        assert!(chain(&error).starts_with(WRITE_ATTEMPT), "{error:?}");
        assert_eq!(owners, [1, 0]);
    }
}
