//! Errors of commands and their exit codes.

mod exit_code;

use std::fmt;

use krypton_runtime::access::{LocalError, reason_of};
use krypton_runtime::call::ApiError;

use crate::render::{Printed, one_line};

pub use exit_code::{ExitCode, MEANINGS};

/// Reason why a command failed. One line each, followed by its sources.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// Invalid usage or a request for help. clap prints it.
    #[error(transparent)]
    Usage(clap::Error),
    #[error(transparent)]
    Home(LocalError),
    #[error("failed to create a client of the cluster")]
    Client(#[source] kube::Error),
    #[error(transparent)]
    Call(Box<CallError>),
    /// A required object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// A debug port does not respond.
    #[error("{0}")]
    NoAnswer(String),
    /// The current state does not allow the operation.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Failed(String),
    /// The command explained the Tenant; `printed` has the output.
    #[error("the Tenant is not Ready, or its readiness is unknown")]
    NotReady { printed: Printed },
    /// A check found a defect; `printed` has the output.
    #[error("at least one check failed")]
    ChecksFailed { printed: Printed },
    /// The operation was partly done; `printed` lists the completed part.
    #[error("{error}")]
    Partly {
        printed: Printed,
        error: Box<KubectlError>,
    },
    /// A failure that left the cluster in a state that the user must know.
    #[error("{consequence}")]
    Interrupted {
        consequence: String,
        source: Box<KubectlError>,
    },
}

impl KubectlError {
    /// HTTP status code of the API server's response.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Call(failed) => failed.error.code(),
            _ => None,
        }
    }

    /// Adds the output of the part that succeeded before this error.
    pub(crate) fn after(self, printed: Printed) -> Self {
        match printed.stdout.is_empty() {
            true => self,
            false => Self::Partly {
                printed,
                error: Box::new(self),
            },
        }
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Call(failed) if matches!(failed.error, ApiError::Timeout { .. }))
    }
}

/// A failed request to an API server, with the advice that fits the response.
#[derive(Debug)]
pub struct CallError {
    /// Context of the cluster.
    pub(crate) context: String,
    pub(crate) verb: &'static str,
    /// The requested objects, as in `tenants acme in the namespace default`.
    pub(crate) objects: String,
    /// Plural with the API group, as a role needs it.
    pub(crate) resource: String,
    pub(crate) plural: String,
    pub(crate) error: ApiError,
}

impl CallError {
    /// The API server's message, or the cause of the failure.
    pub(crate) fn reason(&self) -> String {
        match &self.error {
            ApiError::Failed { source, .. } => one_line(&reason_of(source)),
            late @ ApiError::Timeout { .. } => late.to_string(),
        }
    }

    fn is_unreachable(&self) -> bool {
        let ApiError::Failed { source, .. } = &self.error else {
            return false;
        };
        matches!(
            **source,
            kube::Error::HyperError(_) | kube::Error::Service(_)
        )
    }
}

impl std::error::Error for CallError {}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (context, reason) = (&self.context, self.reason());
        match self.error.code() {
            Some(401) => write!(
                f,
                "the cluster {context:?} does not accept your credentials; log in again ({reason})"
            ),
            Some(403) => write!(
                f,
                "you may not {verb} {} on the cluster {context:?}; you need the verb {verb} on {} ({reason})",
                self.objects,
                self.resource,
                verb = self.verb,
            ),
            Some(404) => write!(
                f,
                "the cluster {context:?} has no {}: it is not a home cluster of Krypton, or its CRDs are not installed yet; choose another with --context or --kubeconfig, or install the CRDs",
                self.plural
            ),
            None if self.is_unreachable() => write!(
                f,
                "the cluster {context:?} cannot be reached; check that it runs, and your network ({reason})"
            ),
            None if matches!(self.error, ApiError::Timeout { .. }) => {
                write!(f, "{reason}; check that the cluster is reachable")
            }
            _ => write!(f, "{}: {reason}", self.error),
        }
    }
}
