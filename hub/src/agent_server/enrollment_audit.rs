//! Records accepted and rejected enrollments: a log line for each, and an event on the member, if it is known.
//! Records only the public part of a token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use krypton_proto::v1::EnrollRequest;
use krypton_types::error_chain::chain;
use krypton_types::join_token::public_part;

use crate::agent_server::enrollment_service::{Admitted, EnrollmentError};
use crate::members::MemberRegistry;
use crate::notices::{HomeEvents, MemberEvent};
use crate::observe::metrics::{Outcome, SessionMetrics};

const SHOWN_CHARS: usize = 64;

/// Reasons of the events.
pub mod reason {
    pub const ENROLLED: &str = "AgentEnrolled";
    pub const REFUSED: &str = "EnrollmentRefused";
}

/// Destinations of the records.
#[derive(Debug)]
pub struct Audit {
    pub members: Arc<MemberRegistry>,
    pub notices: HomeEvents,
    pub metrics: Arc<SessionMetrics>,
}

/// The caller, and its properties known so far.
#[derive(Debug)]
pub(super) struct Attempt {
    address: Option<SocketAddr>,
    token: Option<String>,
    cluster_uid: String,
    agent_version: String,
    /// The member that the token names, and the UID of its EdgeCluster.
    member: Option<String>,
    uid: Option<String>,
}

impl Attempt {
    pub(super) fn new(address: Option<SocketAddr>, request: &EnrollRequest) -> Self {
        let shown = |text: &str| text.chars().take(SHOWN_CHARS).collect();
        Self {
            address,
            token: public_part(&request.token).map(str::to_owned),
            cluster_uid: shown(&request.cluster_uid),
            agent_version: shown(&request.agent_version),
            member: None,
            uid: None,
        }
    }

    pub(super) fn ip(&self) -> Option<IpAddr> {
        self.address.map(|address| address.ip())
    }

    pub(super) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    pub(super) fn is_of(&mut self, member: &str) {
        self.member = Some(member.to_owned());
    }

    pub(super) fn has_object(&mut self, uid: Option<&String>) {
        self.uid = uid.cloned();
    }

    fn who(&self) -> String {
        let address = self.address.map(|address| address.to_string());
        format!(
            "from {} with join token {}",
            address.as_deref().unwrap_or("an unknown address"),
            self.token().unwrap_or("(none)")
        )
    }
}

impl Audit {
    pub(super) fn admitted(&self, attempt: &Attempt, admitted: &Admitted) {
        self.metrics.enrollment(Outcome::Admitted);
        let again = if admitted.again { " again" } else { "" };
        tracing::info!(
            member = admitted.cluster,
            address = %attempt.address.map(|address| address.to_string()).unwrap_or_default(),
            token = attempt.token(),
            agent_version = ?attempt.agent_version,
            cluster_uid = attempt.cluster_uid,
            again = admitted.again,
            "an agent has enrolled"
        );
        let notice = MemberEvent {
            member: admitted.cluster.clone(),
            uid: attempt.uid.clone().unwrap_or_default(),
            reason: reason::ENROLLED,
            message: format!(
                "an agent on the cluster with UID {} has enrolled{again}, {}",
                attempt.cluster_uid,
                attempt.who()
            ),
        };
        let action = if admitted.again {
            "EnrollAgain"
        } else {
            "Enroll"
        };
        self.notices.tell_of(false, action, notice);
    }

    /// Records a rejection. The caller receives `error` without its sources.
    pub(super) fn refused(&self, attempt: &Attempt, error: &EnrollmentError) {
        self.metrics.enrollment(match error {
            EnrollmentError::TooOften(_) => Outcome::Throttled,
            error if error.is_refusal() => Outcome::Refused,
            _ => Outcome::Failed,
        });
        let address = attempt.address.map(|address| address.to_string());
        let address = address.unwrap_or_default();
        if let EnrollmentError::TooOften(_) = error {
            // The rejections that caused the throttling were recorded already.
            tracing::debug!(address, token = attempt.token(), %error, "an enrollment was put off");
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
        let Some(member) = attempt.member.clone().filter(|_| error.is_refusal()) else {
            return;
        };
        let known = || Some(self.members.get(&member).ok()?.uid.clone());
        let uid = attempt.uid.clone().or_else(known).unwrap_or_default();
        let notice = MemberEvent {
            uid,
            reason: reason::REFUSED,
            message: format!("rejected an enrollment {}: {error}", attempt.who()),
            member,
        };
        self.notices.tell_of(true, error.word(), notice);
    }
}
