//! Implements the service `Enrollment`, which issues certificates to agents. Throttles callers, and records
//! accepted and rejected attempts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::edge_cluster::{AgentKey, EdgeCluster, EdgeClusterSpec};
use krypton_proto::v1::enrollment_server::{Enrollment, EnrollmentServer};
use krypton_proto::{Bytes, v1};
use krypton_runtime::clock::{self, BootTime};
use krypton_types::join_token::{Caller, Record};
use krypton_types::names::SELF_CLUSTER;
use krypton_types::spiffe::is_member_name;
use krypton_types::validity::AGENT_CERTIFICATE_LIFE;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Error as KubeError};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};
use zeroize::Zeroize as _;

use crate::agent_server::join_token::{self, TokenRefusal, TokenUse};
use crate::agent_server::listener::Peer;
use crate::ca::{
    AgentCertificate, AuthorityError, CurrentAuthority, REQUEST_MAX_BYTES, public_key_digest,
    read_agent_certificate,
};
use crate::leader::Leader;
use crate::members::agent_keys::{self, NotRenewed};

pub use crate::agent_server::enrollment_audit::{EnrollmentAudit, reason};

use crate::agent_server::enrollment_audit::EnrollmentAttempt;
use crate::agent_server::enrollment_limit::EnrollmentLimiter;
use crate::agent_server::enrollment_result::{AcceptedEnrollment, EnrollmentError};

/// The certificate request and the other fields, which are small.
const MESSAGE_MAX: usize = REQUEST_MAX_BYTES + 4096;
/// Concurrent enrollments. Each sends six requests to the home API server.
const MAX_CONCURRENT: usize = 16;
const DEADLINE: Duration = Duration::from_secs(15);
/// Attempts to read or create the EdgeCluster, in case another writer keeps creating and deleting it.
const TRIES: usize = 3;
/// Attempts to write the status. The fleet also writes it, at most once a second.
const STATUS_TRIES: usize = 5;
/// A Kubernetes UID has 36 characters.
const UID_MAX: usize = 64;

/// Issues certificates to agents.
pub struct EnrollmentService {
    client: Client,
    /// Namespace of the hub, which contains the tokens.
    namespace: String,
    authority: Arc<CurrentAuthority>,
    audit: EnrollmentAudit,
    limiter: EnrollmentLimiter,
    /// Bounds concurrent enrollments.
    slots: Semaphore,
    leader: Leader,
}

impl fmt::Debug for EnrollmentService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnrollmentService")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl EnrollmentService {
    pub fn new(
        client: Client,
        namespace: String,
        authority: Arc<CurrentAuthority>,
        audit: EnrollmentAudit,
        leader: Leader,
    ) -> Self {
        Self {
            client,
            namespace,
            authority,
            audit,
            limiter: EnrollmentLimiter::default(),
            slots: Semaphore::new(MAX_CONCURRENT),
            leader,
        }
    }

    /// Returns the gRPC service with its message size limit.
    pub fn service(self: &Arc<Self>) -> EnrollmentServer<Self> {
        EnrollmentServer::from_arc(Arc::clone(self)).max_decoding_message_size(MESSAGE_MAX)
    }

    /// Checks that the agent may join, and signs its certificate. The reads take time, so each write checks again that
    /// the hub leads.
    async fn admit(
        &self,
        request: &v1::EnrollRequest,
        attempt: &mut EnrollmentAttempt,
        now: Timestamp,
    ) -> Result<AcceptedEnrollment, EnrollmentError> {
        let key = public_key_digest(&request.certificate_request)?;
        if !is_uid(&request.cluster_uid) {
            return Err(EnrollmentError::ClusterUid);
        }
        let caller = Caller {
            key: &key,
            cluster_uid: &request.cluster_uid,
        };
        let client = || self.client.clone();
        let presented = join_token::look_up(client(), &self.namespace, &request.token)
            .await
            .map_err(EnrollmentError::Token)?;
        attempt.member = presented.record().map(|record| record.cluster.clone());
        let again = presented.check(now, caller)? == TokenUse::Again;
        let record = presented.record().cloned().ok_or(TokenRefusal::Unknown)?;
        let cluster = record.cluster.clone();
        if !is_member_name(&cluster) || cluster == SELF_CLUSTER {
            return Err(EnrollmentError::Name { cluster });
        }
        let object = self.edge_cluster_for(&record, again).await?;
        attempt.edge_cluster_uid.clone_from(&object.metadata.uid);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        check_may_join(&cluster, &object, &request.cluster_uid)?;
        // Mark the token before the certificate leaves the hub: a second key with this token is then rejected.
        let (leader, namespace) = (&self.leader, &self.namespace);
        join_token::redeem(client(), leader, namespace, presented, caller, &uid, now)
            .await
            .map_err(EnrollmentError::Token)??;
        let authority = self.authority.get_to_sign(leader);
        let authority = authority.map_err(EnrollmentError::NotLeading)?;
        let request = &request.certificate_request;
        let signed = authority.sign_agent(request, &cluster, &uid, now, AGENT_CERTIFICATE_LIFE);
        let certificates = match signed {
            Err(AuthorityError::Request(error)) => return Err(error.into()),
            signed => signed.map_err(EnrollmentError::Sign)?,
        };
        // Record the key before the certificate leaves the hub: a rotation of the CA then waits for this agent.
        let issued = certificates
            .first()
            .and_then(|der| read_agent_certificate(authority.trust_domain(), der).ok());
        if let Some(issued) = issued {
            let key = issued.recorded_key();
            let status = |object: &EdgeCluster| Ok(enrollment_status(object, &issued, &key));
            patch_status(client(), leader, object, status).await?;
        }
        Ok(AcceptedEnrollment {
            roots: authority.roots(),
            cluster,
            again,
            certificates,
        })
    }

    /// Returns the EdgeCluster that the token is for. An unused token may create it. Deleting an EdgeCluster voids all
    /// older tokens. The use of a newer token also voids them.
    async fn edge_cluster_for(
        &self,
        token: &Record,
        used: bool,
    ) -> Result<EdgeCluster, EnrollmentError> {
        let cluster = &token.cluster;
        let client = || self.client.clone();
        let revoked = || TokenRefusal::Gone {
            cluster: cluster.clone(),
        };
        let tokens = join_token::list_for_member(client(), &self.namespace, cluster).await;
        let tokens = tokens.map_err(EnrollmentError::Token)?;
        if join_token::is_superseded(token, &tokens) {
            let cluster = cluster.clone();
            return Err(TokenRefusal::Superseded { cluster }.into());
        }
        if used || token.edge_cluster.is_some() {
            let current = get(client(), cluster).await?;
            let is_bound = |object: &EdgeCluster| object.metadata.uid == token.edge_cluster;
            return Ok(current.filter(is_bound).ok_or_else(revoked)?);
        }
        let current = get(client(), cluster).await?;
        let uid = current
            .as_ref()
            .and_then(|object| object.metadata.uid.as_deref());
        if join_token::is_revoked(token, &tokens, uid) {
            return Err(revoked().into());
        }
        match current {
            Some(object) => Ok(object),
            None => get_or_create(client(), &self.leader, cluster).await,
        }
    }

    /// Handles one attempt within the rate limit, the concurrency limit and the deadline.
    async fn admit_within_limits(
        &self,
        request: &v1::EnrollRequest,
        attempt: &mut EnrollmentAttempt,
    ) -> Result<AcceptedEnrollment, EnrollmentError> {
        self.limiter
            .begin(attempt.ip(), attempt.token(), BootTime::now())
            .map_err(EnrollmentError::Throttled)?;
        let Ok(_slot) = self.slots.try_acquire() else {
            return Err(EnrollmentError::Busy);
        };
        tokio::time::timeout(DEADLINE, self.admit(request, attempt, clock::wall()))
            .await
            .unwrap_or(Err(EnrollmentError::Deadline(DEADLINE)))
    }
}

#[tonic::async_trait]
impl Enrollment for EnrollmentService {
    async fn enroll(
        &self,
        request: Request<v1::EnrollRequest>,
    ) -> Result<Response<v1::EnrollResponse>, Status> {
        let peer = request.extensions().get::<Peer>();
        let address = peer.map(|peer| peer.address);
        peer.inspect(|peer| peer.mark_request_received());
        let mut request = request.into_inner();
        let ready = self.leader.ensure_writing();
        let ready = ready.and_then(|()| self.authority.get_to_sign(&self.leader));
        if let Err(refusal) = ready {
            request.token.zeroize();
            return Err(refusal);
        }
        let mut attempt = EnrollmentAttempt::new(address, &request);
        let admission = self.admit_within_limits(&request, &mut attempt);
        let accepted = self.leader.tracked(admission).await;
        request.token.zeroize();
        if !accepted
            .as_ref()
            .is_err_and(EnrollmentError::counts_against_limit)
        {
            self.limiter.forgive(attempt.ip(), attempt.token());
        }
        match accepted {
            Ok(accepted) => {
                self.audit.record_accepted(&attempt, &accepted);
                Ok(Response::new(v1::EnrollResponse {
                    certificates: to_wire(accepted.certificates),
                    roots: to_wire(accepted.roots),
                }))
            }
            Err(error) => {
                self.audit.record_rejected(&attempt, &error);
                Err(error.status())
            }
        }
    }
}

/// Checks that the cluster with `cluster_uid` may join as this member.
fn check_may_join(
    cluster: &str,
    object: &EdgeCluster,
    cluster_uid: &str,
) -> Result<(), EnrollmentError> {
    let cluster = cluster.to_owned();
    if object.metadata.deletion_timestamp.is_some() {
        return Err(EnrollmentError::BeingDeleted { cluster });
    }
    if object.spec.banned {
        return Err(EnrollmentError::Banned { cluster });
    }
    let known = object
        .status
        .as_ref()
        .and_then(|status| status.cluster_uid.clone());
    match known {
        Some(known) if known != cluster_uid => {
            tracing::warn!(
                member = cluster,
                known,
                found = cluster_uid,
                "another cluster requested a certificate"
            );
            Err(EnrollmentError::AnotherCluster { cluster })
        }
        _ => Ok(()),
    }
}

async fn get(client: Client, cluster: &str) -> Result<Option<EdgeCluster>, EnrollmentError> {
    let api: Api<EdgeCluster> = Api::all(client);
    api.get_opt(cluster)
        .await
        .map_err(|source| EnrollmentError::EdgeCluster {
            cluster: cluster.to_owned(),
            source,
        })
}

async fn get_or_create(
    client: Client,
    leader: &Leader,
    cluster: &str,
) -> Result<EdgeCluster, EnrollmentError> {
    let api: Api<EdgeCluster> = Api::all(client);
    let failed = |source| EnrollmentError::EdgeCluster {
        cluster: cluster.to_owned(),
        source,
    };
    let new = EdgeCluster::new(cluster, EdgeClusterSpec::default());
    for _ in 0..TRIES {
        if let Some(object) = api.get_opt(cluster).await.map_err(failed)? {
            return Ok(object);
        }
        leader
            .ensure_writing()
            .map_err(EnrollmentError::NotLeading)?;
        let params = PostParams::default();
        match api.create(&params, &new).await {
            Err(KubeError::Api(status)) if status.code == 409 => {}
            created => return created.map_err(failed),
        }
    }
    let cluster = cluster.to_owned();
    Err(EnrollmentError::TooManyConflicts { cluster })
}

/// Returns the status patch with the expiry of the enrolled certificate and its key, which voids all older
/// keys. `None` if the status has both.
fn enrollment_status(
    object: &EdgeCluster,
    issued: &AgentCertificate,
    key: &AgentKey,
) -> Option<Value> {
    let status = object.status.as_ref();
    let keys = status.and_then(|status| status.agent_keys.as_ref());
    let recorded = status.and_then(|status| status.pending_certificate_expiry.as_ref());
    let expiry = recorded.map_or(issued.not_after, |recorded| {
        recorded.0.max(issued.not_after)
    });
    let next_keys = agent_keys::enrolled(keys, key.clone());
    let is_recorded =
        keys == Some(&next_keys) && recorded.is_some_and(|recorded| recorded.0 == expiry);
    (!is_recorded).then(|| {
        json!({
            "pendingCertificateExpiry": Time(expiry),
            "agentKeys": agent_keys::patch(&next_keys),
        })
    })
}

/// Records the key that replaces the agent's current one.
pub(crate) async fn record_renewal(
    client: Client,
    leader: &Leader,
    current: &AgentCertificate,
    next: &AgentCertificate,
    now: Timestamp,
) -> Result<(), Status> {
    let object = get(client.clone(), &current.cluster).await;
    let object = object.map_err(|error| error.status())?;
    let object = object.filter(|object| object.metadata.uid.as_ref() == Some(&current.uid));
    let object = object.ok_or_else(|| Status::unavailable("the EdgeCluster was recreated"))?;
    let [current_key, next_key] = [current, next].map(AgentCertificate::recorded_key);
    let status = |object: &EdgeCluster| {
        let keys = object.status.as_ref().and_then(|it| it.agent_keys.as_ref());
        let keys = agent_keys::renewed(keys, current_key.clone(), next_key.clone(), now).map_err(
            |problem| match problem {
                NotRenewed::Renewing => EnrollmentError::Renewing,
                NotRenewed::Replaced => EnrollmentError::Replaced,
            },
        )?;
        Ok(Some(json!({ "agentKeys": agent_keys::patch(&keys) })))
    };
    let recorded = patch_status(client, leader, object, status).await;
    recorded.map_err(|error| error.status())
}

/// Patches the status of this EdgeCluster. Never patches a recreated one with the same name.
async fn patch_status(
    client: Client,
    leader: &Leader,
    mut object: EdgeCluster,
    new_status: impl Fn(&EdgeCluster) -> Result<Option<Value>, EnrollmentError>,
) -> Result<(), EnrollmentError> {
    let cluster = object.metadata.name.clone().unwrap_or_default();
    let uid = object.metadata.uid.clone();
    let api: Api<EdgeCluster> = Api::all(client.clone());
    for _ in 0..STATUS_TRIES {
        let Some(status) = new_status(&object)? else {
            return Ok(());
        };
        leader
            .ensure_writing()
            .map_err(EnrollmentError::NotLeading)?;
        let patch = Patch::Merge(json!({
            "metadata": { "resourceVersion": object.metadata.resource_version },
            "status": status,
        }));
        let params = PatchParams::default();
        match api.patch_status(&cluster, &params, &patch).await {
            Ok(_) => return Ok(()),
            Err(KubeError::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(source) => return Err(EnrollmentError::EdgeCluster { cluster, source }),
        }
        let current = get(client.clone(), &cluster).await?;
        let current = current.filter(|current| current.metadata.uid == uid);
        object = current.ok_or_else(|| TokenRefusal::Gone {
            cluster: cluster.clone(),
        })?;
    }
    Err(EnrollmentError::TooManyConflicts { cluster })
}

fn is_uid(text: &str) -> bool {
    (1..=UID_MAX).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Converts certificates to their form in messages.
pub(crate) fn to_wire(certificates: Vec<CertificateDer<'static>>) -> Vec<Bytes> {
    let bytes = certificates.into_iter().map(|der| der.to_vec().into());
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use krypton_crds::edge_cluster::EdgeClusterStatus;
    use krypton_types::error_chain::chain;
    use tonic::Code;

    use super::*;
    use crate::agent_server::join_token::TokenError;

    fn edge_cluster(uid: Option<&str>) -> EdgeCluster {
        let mut object = EdgeCluster::new("edge-1", EdgeClusterSpec::default());
        object.status = Some(EdgeClusterStatus {
            cluster_uid: uid.map(str::to_owned),
            ..EdgeClusterStatus::default()
        });
        object
    }

    fn refusal(object: &EdgeCluster) -> Status {
        check_may_join("edge-1", object, "here")
            .unwrap_err()
            .status()
    }

    #[test]
    fn cluster_with_matching_or_unset_uid_may_join() {
        let mut without_uid = edge_cluster(None);
        check_may_join("edge-1", &without_uid, "here").unwrap();
        without_uid.status = None;
        check_may_join("edge-1", &without_uid, "here").unwrap();
        check_may_join("edge-1", &edge_cluster(Some("here")), "here").unwrap();
    }

    #[test]
    fn taken_member_name_rejects_another_cluster() {
        let status = refusal(&edge_cluster(Some("there")));
        assert_eq!(status.code(), Code::FailedPrecondition);
        for word in ["edge-1", "join edge-1 --replace"] {
            assert!(status.message().contains(word), "{}", status.message());
        }
        for uid in ["there", "here"] {
            assert!(!status.message().contains(uid), "{}", status.message());
        }
    }

    #[test]
    fn banned_member_is_denied_and_deleting_one_waits() {
        let mut banned = edge_cluster(Some("here"));
        banned.spec.banned = true;
        assert_eq!(refusal(&banned).code(), Code::PermissionDenied);
        let mut deleted = edge_cluster(Some("here"));
        deleted.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        assert_eq!(refusal(&deleted).code(), Code::Unavailable);
    }

    #[test]
    fn invalid_cluster_uid_is_rejected() {
        assert!(is_uid("6f1f2f3c-0000-4000-8000-0123456789ab"));
        for invalid in ["", "a b", "a\n", "ü", "a\"", &"a".repeat(65)] {
            assert!(!is_uid(invalid), "{invalid:?}");
        }
    }

    #[test]
    fn internal_error_detail_is_hidden_from_client() {
        let error =
            EnrollmentError::Token(TokenError::Api(krypton_runtime::call::ApiError::Timeout {
                attempt: "reading Secret krypton/krypton-join-x".into(),
                deadline: DEADLINE,
            }));
        let status = error.status();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(!status.message().contains("krypton-join"));
        assert!(chain(&error).contains("krypton-join-x"));
    }
}
