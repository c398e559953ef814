package org.apache.lucene.search.intervals;

import org.apache.lucene.search.Query;

/** Declared so that the server links; the `intervals` query is not available in this jar. */
public final class IntervalQuery extends Query {
    public IntervalQuery(String field, IntervalsSource source) {
        throw new UnsupportedOperationException("the intervals query is not available");
    }

    @Override
    public String toString(String field) {
        return "";
    }

    @Override
    public boolean equals(Object other) {
        return this == other;
    }

    @Override
    public int hashCode() {
        return System.identityHashCode(this);
    }
}
