//! The result of an enrollment: the issued certificates, or why it failed.

use std::time::Duration;

use kube::Error as KubeError;
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tonic::Status;

use crate::agent_server::enrollment_limit::LimitExceeded;
use crate::agent_server::join_token::{TokenError, TokenRefusal};
use crate::ca::{AuthorityError, RequestError};

/// An accepted enrollment.
pub(super) struct AcceptedEnrollment {
    pub(super) cluster: String,
    pub(super) again: bool,
    pub(super) certificates: Vec<CertificateDer<'static>>,
    /// The roots at the time of signing.
    pub(super) roots: Vec<CertificateDer<'static>>,
}

/// Why an enrollment failed. The agent receives the `Display` text.
#[derive(Debug, Error)]
pub(super) enum EnrollmentError {
    #[error("the hub is busy with other enrollments; retry later")]
    Busy,
    #[error(
        "too many failed enrollments from {}; retry in {} s", .0.caller, .0.wait.as_secs() + 1
    )]
    Throttled(LimitExceeded),
    #[error("the home cluster did not respond to the hub within {} s; retry later", .0.as_secs())]
    Deadline(Duration),
    /// The hub has lost its Lease or its CA since the request arrived.
    #[error("{}", .0.message())]
    NotLeading(Status),
    #[error("the hub could not read or mark the join token; retry later, or see the hub's log")]
    Token(#[source] TokenError),
    #[error(
        "the hub could not read, create or update EdgeCluster {cluster}; retry later, or see the hub's log"
    )]
    EdgeCluster {
        cluster: String,
        #[source]
        source: KubeError,
    },
    #[error("EdgeCluster {cluster} keeps changing; retry later")]
    TooManyConflicts { cluster: String },
    #[error("the EdgeCluster {cluster} is being deleted; the cluster can join when it is gone")]
    BeingDeleted { cluster: String },
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("the UID of the cluster's namespace kube-system is missing or invalid")]
    ClusterUid,
    #[error(transparent)]
    Refused(#[from] TokenRefusal),
    #[error(
        "the join token is for {cluster:?}, which is an invalid or reserved name; run 'kubectl krypton join NAME' with another name"
    )]
    Name { cluster: String },
    #[error(
        "cluster {cluster} is banned; set spec.banned of its EdgeCluster to false and start the agent again"
    )]
    Banned { cluster: String },
    #[error(
        "member {cluster} is bound to a different cluster; if you rebuilt the cluster, run 'kubectl krypton join {cluster} --replace'"
    )]
    AnotherCluster { cluster: String },
    #[error("the hub has just issued another certificate for this key; the agent retries")]
    Renewing,
    #[error("a newer key has replaced that of this agent's certificate")]
    Replaced,
    #[error("the hub could not sign the certificate; see the hub's log")]
    Sign(#[source] AuthorityError),
}

impl EnrollmentError {
    pub(super) fn status(&self) -> Status {
        let message = self.to_string();
        match self {
            Self::Busy | Self::Throttled(_) | Self::Renewing => Status::resource_exhausted(message),
            Self::Deadline(_)
            | Self::NotLeading(_)
            | Self::Token(_)
            | Self::EdgeCluster { .. }
            | Self::TooManyConflicts { .. }
            | Self::BeingDeleted { .. }
            | Self::Replaced => Status::unavailable(message),
            Self::Request(_) | Self::ClusterUid => Status::invalid_argument(message),
            Self::Refused(_) | Self::Banned { .. } => Status::permission_denied(message),
            Self::Name { .. } | Self::AnotherCluster { .. } => Status::failed_precondition(message),
            Self::Sign(_) => Status::internal(message),
        }
    }

    /// Whether the caller is at fault: a guess, or a credential that is not valid here.
    pub(super) fn is_refusal(&self) -> bool {
        self.refusal_action().is_some()
    }

    /// Whether the failure counts against the caller's rate limit.
    pub(super) fn counts_against_limit(&self) -> bool {
        self.is_refusal() || matches!(self, Self::Throttled(_))
    }

    /// Returns the action of the event. Events with the same action and member are aggregated.
    pub(super) fn refusal_action(&self) -> Option<&'static str> {
        Some(match self {
            Self::Refused(refusal) => refusal.event_action(),
            Self::Request(_) => "RequestInvalid",
            Self::ClusterUid => "ClusterUIDInvalid",
            Self::Name { .. } => "NameInvalid",
            Self::Banned { .. } => "Banned",
            Self::AnotherCluster { .. } => "AnotherCluster",
            Self::Busy
            | Self::Throttled(_)
            | Self::Renewing
            | Self::Replaced
            | Self::Deadline(_)
            | Self::NotLeading(_)
            | Self::Token(_)
            | Self::EdgeCluster { .. }
            | Self::TooManyConflicts { .. }
            | Self::BeingDeleted { .. }
            | Self::Sign(_) => return None,
        })
    }
}
