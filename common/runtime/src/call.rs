//! A call of an API server, with a deadline and one error type.

use std::borrow::Cow;
use std::time::Duration;

use kube::api::{DeleteParams, Preconditions};
use kube::core::{ObjectMeta, Status};

/// Deadline of an ordinary call.
pub const CALL: Duration = Duration::from_secs(10);

/// A failed call. `attempt` names the operation and the object, as in "reading the Secret krypton/ca".
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("{attempt}: no response within {} s; check that the API server is reachable", .deadline.as_secs_f32())]
    Timeout {
        attempt: Cow<'static, str>,
        deadline: Duration,
    },
    #[error("{attempt} failed{}", fix(.source))]
    Failed {
        attempt: Cow<'static, str>,
        source: Box<kube::Error>,
    },
}

impl ApiError {
    /// Returns the response of the API server, or `None` if it is missing or cannot be decoded.
    pub fn status(&self) -> Option<&Status> {
        match self {
            Self::Failed { source, .. } => match &**source {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::Timeout { .. } => None,
        }
    }

    /// Returns whether a retry can succeed without a change by the user. 410 reports an outdated list or watch, so no
    /// user can correct it. An intermediary may respond with 404 for a while.
    pub fn is_transient(&self) -> bool {
        self.code()
            .is_none_or(|code| code >= 500 || matches!(code, 404 | 409 | 410 | 429))
    }

    /// Returns the HTTP status code of the response.
    pub fn code(&self) -> Option<u16> {
        self.status().map(|status| status.code)
    }
}

/// Returns the fix for a failure, unless the response contains it.
fn fix(error: &kube::Error) -> &'static str {
    match error {
        kube::Error::Api(status) => match status.code {
            401 => "; check the credentials",
            403 => "; grant the missing permission",
            _ => "",
        },
        kube::Error::HyperError(_) | kube::Error::Service(_) => {
            "; check that the API server is reachable"
        }
        _ => "",
    }
}

/// Runs a call with the deadline [`CALL`].
pub fn call<T>(
    attempt: impl Into<Cow<'static, str>>,
    request: impl Future<Output = kube::Result<T>>,
) -> impl Future<Output = Result<T, ApiError>> {
    call_within(CALL, attempt, request)
}

/// Runs a call with another deadline. The request is boxed here and not at the first poll, because it is large and its
/// caller often waits in a long-lived task.
pub fn call_within<T>(
    deadline: Duration,
    attempt: impl Into<Cow<'static, str>>,
    request: impl Future<Output = kube::Result<T>>,
) -> impl Future<Output = Result<T, ApiError>> {
    let attempt = attempt.into();
    let response = tokio::time::timeout(deadline, Box::pin(request));
    async move {
        match response.await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(source)) => Err(ApiError::Failed {
                attempt,
                source: Box::new(source),
            }),
            Err(_) => Err(ApiError::Timeout { attempt, deadline }),
        }
    }
}

/// Returns `None` if the API server reports that this object does not exist. Another 404 comes from an intermediary, or
/// from an API server that does not serve the resource.
pub fn existing<T>(
    result: kube::Result<T>,
    (resource, name): (&str, &str),
) -> kube::Result<Option<T>> {
    let names_object = |status: &Status| {
        let details = status.details.as_ref();
        status.code == 404 && details.is_some_and(|it| it.kind == resource && it.name == name)
    };
    match result {
        Err(kube::Error::Api(status)) if names_object(&status) => Ok(None),
        result => result.map(Some),
    }
}

/// Deletes an object if it has not changed since it was read.
pub fn if_unchanged(read: &ObjectMeta) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        uid: read.uid.clone(),
        resource_version: read.resource_version.clone(),
    })
}

/// Deletes an object if it still has this UID.
pub fn if_uid(uid: Option<String>) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        uid,
        ..Preconditions::default()
    })
}

#[cfg(test)]
mod tests {
    use krypton_types::error_chain::chain;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn call_ends_at_its_deadline() {
        let hanging = std::future::pending::<kube::Result<()>>();
        let error = call("reading the Secret a/b", hanging).await.unwrap_err();
        assert_eq!(
            chain(&error),
            "reading the Secret a/b: no response within 10 s; check that the API server is reachable"
        );
        assert_eq!(error.code(), None);
    }

    #[test]
    fn only_rejections_need_the_user() {
        for (code, is_transient) in [
            (400, false),
            (401, false),
            (403, false),
            (404, true),
            (409, true),
            (410, true),
            (422, false),
            (429, true),
            (500, true),
        ] {
            let status = Status::failure("no", "").with_code(code);
            let error = ApiError::Failed {
                attempt: "reading it".into(),
                source: Box::new(kube::Error::Api(status.boxed())),
            };
            assert_eq!(error.is_transient(), is_transient, "{code}");
        }
    }

    #[tokio::test]
    async fn failed_call_keeps_the_answer() {
        let status = Status::failure("you may not", "Forbidden").with_code(403);
        let response =
            std::future::ready(kube::Result::<()>::Err(kube::Error::Api(status.boxed())));
        let error = call("reading the Secret a/b", response).await.unwrap_err();
        assert_eq!(error.code(), Some(403));
        let message = "reading the Secret a/b failed; grant the missing permission: ";
        assert!(chain(&error).starts_with(message), "{}", chain(&error));
    }
}
