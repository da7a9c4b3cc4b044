//! Why an action did not succeed, and what that means for the next attempt.

use std::time::Duration;

use krypton_helm::driver::{HelmError, is_suspended};
use krypton_runtime::call::ApiError;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;

/// First pause after a write conflict. It doubles with each further conflict: up to 16 times this value for a release,
/// and up to separate limits for placed Tenants and workspaces.
pub(crate) const CONFLICT_PAUSE: Duration = Duration::from_millis(250);

pub(crate) type ActionResult<T = ()> = Result<T, ActionError>;

/// Why an action did not succeed.
#[derive(Debug)]
pub(crate) enum ActionError {
    /// Shown in a condition and retried after a back-off. `permanent` if only a change can help. `revision` is the one
    /// whose deletion ends the failure.
    Failed {
        reason: &'static str,
        message: String,
        permanent: bool,
        revision: Option<u32>,
    },
    /// An input of the plan has changed: plan again shortly.
    Conflict,
    /// A transient failure of the API server, which the Tenant did not cause.
    Transient(String),
    /// The API server refuses the request itself; a retry alone does not help.
    Refused(String),
}

impl ActionError {
    /// Returns a failure that another attempt may overcome.
    pub(crate) fn failed(reason: &'static str, message: String) -> Self {
        Self::Failed {
            reason,
            message,
            permanent: false,
            revision: None,
        }
    }

    /// Returns a failure that only a change can overcome.
    pub(super) fn permanent(reason: &'static str, message: String) -> Self {
        Self::Failed {
            reason,
            message,
            permanent: true,
            revision: None,
        }
    }

    /// Whether another user has changed the release.
    pub(crate) fn is_tampering(&self) -> bool {
        matches!(self, Self::Failed { reason, .. } if *reason == reason::RELEASE_TAMPERED)
    }

    /// Returns a permanent failure that ends when a user deletes this revision.
    pub(super) fn from_revision(reason: &'static str, message: String, revision: u32) -> Self {
        Self::Failed {
            reason,
            message,
            permanent: true,
            revision: Some(revision),
        }
    }

    /// Returns the outcome for metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Failed { .. } => "failed",
            Self::Conflict => "conflict",
            Self::Transient(_) | Self::Refused(_) => "transient",
        }
    }

    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Failed { message, .. } | Self::Transient(message) | Self::Refused(message) => {
                message
            }
            Self::Conflict => "changed by another writer",
        }
    }
}

pub(super) fn unavailable(error: &HelmError) -> ActionError {
    ActionError::failed(reason::HELM_UNAVAILABLE, chain(error))
}

fn suspended(message: String) -> ActionError {
    ActionError::failed(reason::SUSPENDED, message)
}

/// Returns the failure of a Helm run. Its message is `unfinished` if Helm itself has returned no error.
pub(super) fn helm_failure(
    error: Option<HelmError>,
    reason: &'static str,
    unfinished: String,
) -> ActionError {
    match error {
        None => ActionError::failed(reason, unfinished),
        Some(HelmError::Stopped) => ActionError::Conflict,
        Some(error) if error.is_local() => unavailable(&error),
        Some(HelmError::Suspended { message }) => suspended(message),
        // Every failed rollback is retried.
        Some(error) if error.is_permanent() && reason != reason::ROLLBACK_FAILED => {
            ActionError::permanent(reason, chain(&error))
        }
        Some(error) => ActionError::failed(reason, chain(&error)),
    }
}

impl From<ApiError> for ActionError {
    /// A response that a retry of the same request would get again is a refusal.
    fn from(error: ApiError) -> Self {
        let Some(status) = error.status() else {
            return transient(&error);
        };
        match status.code {
            404 | 409 => Self::Conflict,
            _ if is_suspended(&status.message) => suspended(status.message.clone()),
            400 | 403 | 405 | 413 | 415 | 422 => Self::Refused(chain(&error)),
            _ => transient(&error),
        }
    }
}

pub(super) fn transient(error: &dyn std::error::Error) -> ActionError {
    ActionError::Transient(chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_repeat_are_refusals() {
        let error_for = |code: u16| {
            let status = kube::core::Status::failure("no", "Reason").with_code(code);
            ActionError::from(ApiError::Failed {
                attempt: "writing".into(),
                source: Box::new(kube::Error::Api(status.boxed())),
            })
        };
        for code in [400, 403, 405, 413, 415, 422] {
            assert!(matches!(error_for(code), ActionError::Refused(_)), "{code}");
        }
        for code in [401, 429, 500, 503] {
            let error = error_for(code);
            assert!(matches!(error, ActionError::Transient(_)), "{code}");
        }
    }
}
