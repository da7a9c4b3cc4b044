//! Records accepted and rejected enrollments: a log line for each, and an event on the member, if it is known.
//! Records only the public part of a token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use krypton_proto::v1::EnrollRequest;
use krypton_types::error_chain::chain;
use krypton_types::join_token::public_part;

use crate::agent_server::enrollment_result::{AcceptedEnrollment, EnrollmentError};
use crate::agent_server::metrics::{EnrollmentOutcome, SessionMetrics};
use crate::home_events::{HomeEvents, MemberEvent};
use crate::members::MemberRegistry;

/// Longest text of a caller in a record.
const MAX_CHARS: usize = 64;

/// Reasons of the events.
pub mod reason {
    pub const ENROLLED: &str = "AgentEnrolled";
    pub const REFUSED: &str = "EnrollmentRefused";
}

/// Destinations of the records.
#[derive(Debug)]
pub struct EnrollmentAudit {
    pub members: Arc<MemberRegistry>,
    pub events: HomeEvents,
    pub metrics: Arc<SessionMetrics>,
}

/// The caller, and its properties known so far.
#[derive(Debug)]
pub(super) struct EnrollmentAttempt {
    address: Option<SocketAddr>,
    token: Option<String>,
    cluster_uid: String,
    agent_version: String,
    /// The member that the token names, and the UID of its EdgeCluster.
    pub(super) member: Option<String>,
    pub(super) edge_cluster_uid: Option<String>,
}

impl EnrollmentAttempt {
    pub(super) fn new(address: Option<SocketAddr>, request: &EnrollRequest) -> Self {
        let truncated = |text: &str| text.chars().take(MAX_CHARS).collect();
        Self {
            address,
            token: public_part(&request.token).map(str::to_owned),
            cluster_uid: truncated(&request.cluster_uid),
            agent_version: truncated(&request.agent_version),
            member: None,
            edge_cluster_uid: None,
        }
    }

    pub(super) fn ip(&self) -> Option<IpAddr> {
        self.address.map(|address| address.ip())
    }

    pub(super) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    fn caller(&self) -> String {
        let address = self.address.map(|address| address.to_string());
        format!(
            "from {} with join token {}",
            address.as_deref().unwrap_or("an unknown address"),
            self.token().unwrap_or("(none)")
        )
    }
}

impl EnrollmentAudit {
    pub(super) fn record_accepted(
        &self,
        attempt: &EnrollmentAttempt,
        accepted: &AcceptedEnrollment,
    ) {
        self.metrics.count_enrollment(EnrollmentOutcome::Admitted);
        let (suffix, action) = match accepted.again {
            true => (" again", "EnrollAgain"),
            false => ("", "Enroll"),
        };
        tracing::info!(
            member = accepted.cluster,
            address = %attempt.address.map(|address| address.to_string()).unwrap_or_default(),
            token = attempt.token(),
            agent_version = ?attempt.agent_version,
            cluster_uid = attempt.cluster_uid,
            again = accepted.again,
            "agent enrolled"
        );
        let event = MemberEvent {
            member: accepted.cluster.clone(),
            uid: attempt.edge_cluster_uid.clone().unwrap_or_default(),
            reason: reason::ENROLLED,
            message: format!(
                "an agent on the cluster with UID {} has enrolled{suffix}, {}",
                attempt.cluster_uid,
                attempt.caller()
            ),
        };
        self.events.record_for_member(false, action, event);
    }

    /// Records a rejection. The caller receives `error` without its sources.
    pub(super) fn record_rejected(&self, attempt: &EnrollmentAttempt, error: &EnrollmentError) {
        self.metrics.count_enrollment(match error {
            EnrollmentError::Throttled(_) => EnrollmentOutcome::Throttled,
            error if error.is_refusal() => EnrollmentOutcome::Refused,
            _ => EnrollmentOutcome::Failed,
        });
        let address = attempt.address.map(|address| address.to_string());
        let address = address.unwrap_or_default();
        if let EnrollmentError::Throttled(_) = error {
            // The rejections that caused the throttling were recorded already.
            tracing::debug!(address, token = attempt.token(), %error, "enrollment postponed");
            return;
        }
        tracing::warn!(
            member = attempt.member,
            address,
            token = attempt.token(),
            agent_version = ?attempt.agent_version,
            cluster_uid = ?attempt.cluster_uid,
            error = %chain(error),
            "rejected an enrollment"
        );
        let (Some(member), Some(action)) = (attempt.member.clone(), error.refusal_action()) else {
            return;
        };
        let known_uid = || Some(self.members.get(&member).ok()?.uid.clone());
        let uid = attempt.edge_cluster_uid.clone().or_else(known_uid);
        let uid = uid.unwrap_or_default();
        let event = MemberEvent {
            uid,
            reason: reason::REFUSED,
            message: format!("rejected an enrollment {}: {error}", attempt.caller()),
            member,
        };
        self.events.record_for_member(true, action, event);
    }
}
