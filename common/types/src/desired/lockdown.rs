//! Limits for tenants that do not trust each other. All members have the same.

use serde::{Deserialize, Serialize};

/// How far an object of a tenant reaches beyond its own namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Lockdown {
    /// An object uses no namespace but its own and those made for it. Its annotations take over no release.
    #[serde(skip_serializing_if = "krypton_crds::is_default")]
    pub no_cross_namespace_refs: bool,
    /// The service account of the object's namespace that Helm acts as, where the object names none. Empty: Helm acts
    /// as the fleet's account.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub default_service_account: String,
}

impl Lockdown {
    /// The user that Helm acts as for an object of `namespace` that names the account `named`.
    pub fn user(&self, namespace: &str, named: Option<&str>) -> Option<String> {
        let named = named.filter(|named| !named.is_empty());
        let account = named.unwrap_or(&self.default_service_account);
        (!account.is_empty()).then(|| format!("system:serviceaccount:{namespace}:{account}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_always_of_the_objects_namespace() {
        let with = |default: &str| Lockdown {
            default_service_account: default.to_owned(),
            ..Lockdown::default()
        };
        for (default, named, user) in [
            ("", None, None),
            ("", Some(""), None),
            ("", Some("own"), Some("system:serviceaccount:team-a:own")),
            ("fleet", None, Some("system:serviceaccount:team-a:fleet")),
            (
                "fleet",
                Some(""),
                Some("system:serviceaccount:team-a:fleet"),
            ),
            (
                "fleet",
                Some("own"),
                Some("system:serviceaccount:team-a:own"),
            ),
        ] {
            let found_user = with(default).user("team-a", named);
            assert_eq!(found_user.as_deref(), user, "{default:?} {named:?}");
        }
    }
}
