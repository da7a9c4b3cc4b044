//! Tracks the CRD schema under which Tenants were listed, and so whether the list is complete enough for actions.

/// CRD schema under which the known Tenants were listed.
///
/// An API server omits fields that its schema does not contain, such as the workspace. No watch reports a schema
/// change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TenantListSchema {
    /// The current schema or a newer one. Also the state before the first list.
    #[default]
    Current,
    /// An older Krypton schema. The reconciler lists the Tenants again after it is replaced.
    Older,
    /// The schema of krypton-operator. Until it is replaced, the reconciler neither writes nor reports Tenants: a write
    /// would store them without the omitted fields.
    KryptonOperator,
    /// Listed by a reconciler without write permission, immediately after another process replaced krypton-operator's
    /// schema. The list may still follow the old schema, so it is good enough for reports but not for actions.
    Observed,
}

impl TenantListSchema {
    /// Returns the state after the watch showed this schema.
    pub(super) fn with_schema(self, schema: Option<Option<u32>>) -> Self {
        match (self, schema) {
            (_, Some(None)) | (Self::KryptonOperator, _) => Self::KryptonOperator,
            (Self::Older | Self::Observed, _) => self,
            (Self::Current, Some(Some(version))) if version < krypton_crds::SCHEMA_VERSION => {
                Self::Older
            }
            (Self::Current, _) => Self::Current,
        }
    }

    /// Returns true if the list is good enough to reconcile, with (`permitted`) or without write permission.
    pub(super) fn is_usable(self, permitted: bool) -> bool {
        match self {
            Self::Current | Self::Older => true,
            Self::Observed => !permitted,
            Self::KryptonOperator => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_crds::SCHEMA_VERSION;

    use super::TenantListSchema::{self, Current, KryptonOperator, Observed, Older};

    #[test]
    fn tenants_listed_under_original_schema_are_not_reconciled() {
        let current = Some(SCHEMA_VERSION);
        let older = Some(SCHEMA_VERSION - 1);
        for (previous, schema, expected) in [
            (Current, None, Current),
            (Current, Some(current), Current),
            (Current, Some(Some(SCHEMA_VERSION + 1)), Current),
            (Current, Some(older), Older),
            (Current, Some(None), KryptonOperator),
            (Older, Some(current), Older),
            (Older, Some(None), KryptonOperator),
            // The current schema replaced it, but the Tenants have not been listed since.
            (KryptonOperator, Some(current), KryptonOperator),
            (KryptonOperator, Some(older), KryptonOperator),
            (Observed, Some(current), Observed),
            (Observed, Some(None), KryptonOperator),
        ] {
            assert_eq!(
                TenantListSchema::with_schema(previous, schema),
                expected,
                "{previous:?} {schema:?}"
            );
        }
        let is_usable =
            |listed: TenantListSchema| [true, false].map(|permitted| listed.is_usable(permitted));
        assert_eq!([Current, Older].map(is_usable), [[true, true]; 2]);
        assert_eq!(
            [is_usable(Observed), is_usable(KryptonOperator)],
            [[false, true], [false, false]]
        );
    }
}
