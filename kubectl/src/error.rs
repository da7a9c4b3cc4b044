//! Errors of commands and their exit codes.

mod exit_code;

use std::fmt;

use clap::error::ErrorKind;
use krypton_runtime::access::{LocalError, api_error_message};
use krypton_runtime::call::ApiError;

use crate::render::{CommandOutput, one_line};

pub use exit_code::ExitCode;

/// Reason why a command failed. One line each, followed by its sources.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// Invalid usage or a request for help. clap prints it.
    #[error(transparent)]
    Usage(clap::Error),
    #[error(transparent)]
    Kubeconfig(LocalError),
    #[error("failed to create a client of the cluster")]
    Client(#[source] kube::Error),
    #[error(transparent)]
    Call(Box<CallError>),
    /// A required object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// A debug port does not respond.
    #[error("{0}")]
    NoResponse(String),
    /// The current state does not allow the operation.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Failed(String),
    /// The explanation of an object that is not Ready, or the result of checks that found a defect.
    #[error("the object is not Ready, or a check failed")]
    NotReady { output: CommandOutput },
    /// The operation was partly done; `output` lists that part.
    #[error("{error}")]
    Partial {
        output: CommandOutput,
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
    /// Invalid usage that the definition of the command line does not express.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        let message = format!("{message}\n");
        Self::Usage(clap::Error::raw(ErrorKind::ArgumentConflict, message))
    }

    /// HTTP status code of the API server's response.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Call(call) => call.error.code(),
            _ => None,
        }
    }

    /// Adds the output of the part that succeeded before this error.
    pub(crate) fn with_output(self, output: CommandOutput) -> Self {
        match output.stdout.is_empty() {
            true => self,
            false => Self::Partial {
                output,
                error: Box::new(self),
            },
        }
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Call(call) if matches!(call.error, ApiError::Timeout { .. }))
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

/// Prefix of all errors of rustls about a server's certificate.
const UNTRUSTED: &str = "invalid peer certificate";

impl CallError {
    /// The API server's message, or the cause of the failure.
    pub(crate) fn reason(&self) -> String {
        match &self.error {
            ApiError::Failed { source, .. } => one_line(&api_error_message(source)),
            timeout @ ApiError::Timeout { .. } => timeout.to_string(),
        }
    }

    pub(crate) fn is_unreachable(&self) -> bool {
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
            None if reason.contains(UNTRUSTED) => write!(
                f,
                "the certificate of the cluster {context:?} is not trusted; correct certificate-authority-data in the kubeconfig ({reason})"
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
