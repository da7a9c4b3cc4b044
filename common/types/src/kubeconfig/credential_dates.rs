//! Validity period of a credential: the validity of a certificate, or the claims of a JWT. Verifies no signature: the
//! dates are a hint for users, and the API server decides.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::KubeconfigError;

/// Tolerated clock skew. Within it, the hub still tries a credential, as the API server may accept it.
pub(super) const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(10);

/// Validity period of one credential. `None` means no bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CredentialValidity {
    path: String,
    pub(super) not_before: Option<Timestamp>,
    pub(super) expires: Option<Timestamp>,
}

impl CredentialValidity {
    pub(super) fn unlimited(path: String) -> Self {
        Self {
            path,
            not_before: None,
            expires: None,
        }
    }

    pub(super) fn from_certificate(
        path: String,
        validity: &x509_parser::prelude::Validity,
    ) -> Self {
        // 9999-12-31, which stands for "never", exceeds the range of a Timestamp.
        let timestamp = |seconds: i64| Timestamp::from_second(seconds).ok();
        Self {
            path,
            not_before: timestamp(validity.not_before.timestamp()),
            expires: timestamp(validity.not_after.timestamp()),
        }
    }

    /// Returns a period without bounds if the token is not a JWT.
    pub(super) fn from_token(path: String, token: &str) -> Self {
        let claims = claims(token);
        let claim_date = |name: &str| date(claims.as_ref()?.get(name)?);
        Self {
            path,
            not_before: claim_date("nbf"),
            expires: claim_date("exp"),
        }
    }

    pub(super) fn check(&self, now: Timestamp) -> Result<(), KubeconfigError> {
        match (self.not_before, self.expires) {
            (_, Some(expires)) if now.duration_since(expires) > CLOCK_SKEW => {
                Err(KubeconfigError::Expired {
                    path: self.path.clone(),
                    expires,
                })
            }
            (Some(not_before), _) if not_before.duration_since(now) > CLOCK_SKEW => {
                Err(KubeconfigError::NotYetValid {
                    path: self.path.clone(),
                    not_before,
                    now,
                })
            }
            _ => Ok(()),
        }
    }
}

fn claims(token: &str) -> Option<Value> {
    let mut parts = token.split('.');
    let (Some(_), Some(payload), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

/// Parses seconds since 1970. Drops a fraction, which is legal.
fn date(claim: &Value) -> Option<Timestamp> {
    let seconds = claim
        .as_i64()
        .or_else(|| claim.as_f64().map(|seconds| seconds as i64))?;
    Timestamp::from_second(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn jwt_claims_give_validity_dates() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        for (claims, not_before, expires) in [
            (r#"{"exp":2000,"nbf":1000}"#, Some(at(1000)), Some(at(2000))),
            (r#"{"exp":2000.9}"#, None, Some(at(2000))),
            (r#"{"exp":"2000"}"#, None, None),
            (r#"{"exp":1e300}"#, None, None),
            (r#"{"exp":null}"#, None, None),
            ("[]", None, None),
            ("not json", None, None),
        ] {
            let validity = CredentialValidity::from_token(String::new(), &token(claims));
            assert_eq!(
                (validity.not_before, validity.expires),
                (not_before, expires),
                "{claims}"
            );
        }
    }

    #[test]
    fn opaque_token_has_no_dates() {
        let four_parts = format!("{}.x", token(r#"{"exp":1}"#));
        for opaque in ["", "opaque", "a.b", "a.%.c", "..", four_parts.as_str()] {
            let validity = CredentialValidity::from_token("p".to_owned(), opaque);
            assert_eq!(
                validity,
                CredentialValidity::unlimited("p".to_owned()),
                "{opaque}"
            );
        }
    }
}
